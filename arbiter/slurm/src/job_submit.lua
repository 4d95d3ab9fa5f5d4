-- Counters as a resource (docs/guide/slurm.md). Printed by: umpire slurm job-submit
-- It is all of job_submit.lua, or, where a site has its own, that calls
-- umpire_counters(job_desc, part_list) and returns what this returns unless it is slurm.SUCCESS.

-- Whether tasks run on the CPUs that Slurm gave their job, and on no others.
local confined = @CONFINED@

-- What --counters of Umpire's plugin said, if it was given.
local function asked(job_desc)
   for _, line in pairs(job_desc.spank_job_env or {}) do
      local text = string.match(line, "^_SLURM_SPANK_OPTION_umpire_counters=(.*)$")
      if text then return text end
   end
end

-- Counters of a node: an event has a programmable one of its own.
local function count(text)
   local programmable, fixed = 0, 0
   for part in string.gmatch(text, "[^,]+") do
      local events = string.match(part, "^events=(.+)$")
      fixed = fixed + tonumber(string.match(part, "^fixed=(%d+)$") or 0)
      programmable = programmable + tonumber(string.match(part, "^(%d+)$") or 0)
      if events then
         local _, more = string.gsub(events, "%+", "")
         programmable = programmable + more + 1
      end
   end
   return programmable, fixed
end

-- Whether jobs of this partition run on CPUs that another job has, too.
local function shares(part, job_desc)
   local forced = part.max_share >= 32768
   local most = part.max_share % 32768
   -- A whole node is its own.
   if most == 0 or (job_desc.shared == 0 and not forced) then return false end
   if not confined then return true end
   if forced then return most > 1 end
   return most > 1 and (job_desc.shared == 1 or job_desc.shared == 2)
end

local function shares_any(job_desc, part_list)
   for name, part in pairs(part_list) do
      if job_desc.partition == nil or job_desc.partition == "" then
         if part.flag_default == 1 and shares(part, job_desc) then return true end
      else
         for wanted in string.gmatch(job_desc.partition, "[^,]+") do
            if wanted == name and shares(part, job_desc) then return true end
         end
      end
   end
   return false
end

-- A job on CPUs of its own asks for no GRES: its counters are those of its CPUs.
function umpire_counters(job_desc, part_list)
   local text = asked(job_desc)
   if not text or not shares_any(job_desc, part_list) then return slurm.SUCCESS end
   local by_hand = job_desc.tres_per_node or ""
   local ended = string.gsub(by_hand, ",", ":,") .. ":"
   if string.find(ended, ":pmc:") or string.find(ended, ":pmcfixed:") then
      slurm.log_user("--counters asks for the GRES pmc and pmcfixed by itself: leave them out of --gres")
      return slurm.ERROR
   end
   local programmable, fixed = count(text)
   local gres = by_hand
   for name, number in pairs({ pmc = programmable, pmcfixed = fixed }) do
      if number > 0 then
         gres = gres .. (gres == "" and "" or ",") .. "gres:" .. name .. ":" .. number
      end
   end
   job_desc.tres_per_node = gres
   return slurm.SUCCESS
end

function slurm_job_submit(job_desc, part_list, submit_uid)
   return umpire_counters(job_desc, part_list)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
