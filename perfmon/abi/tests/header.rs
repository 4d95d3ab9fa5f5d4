//! The C header is what the tables say, and a C compiler agrees with the tables
//! about where each field lies.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, iter};

use perfmon_abi::{Message, Record, consts, records};

const HEADER: &str = "../include/perfmon.h";

const BEGIN: &str = r"/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The perfmon2 interface (HPL-2004-200 (R.1), version 0.6) as Umpire serves it:
 * docs/perfmon-wire.md. A thread of the specification is a vCPU, a CPU core is a
 * thread of Umpire that runs vCPUs. Numbers behind the comments are sections of
 * the specification.
 *
 * Generated from the tables in perfmon/abi: do not edit.
 */
#ifndef UMPIRE_PERFMON_H
#define UMPIRE_PERFMON_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h> /* struct timespec is POSIX: with -std=c99, define _POSIX_C_SOURCE */

#ifdef __cplusplus
extern \x22C\x22 {
#endif
";

const MACROS: &str = r"
/* Elements of the vectors of bits (3.1.2, 3.1.17). */
#define PFM_MAX_PMC_BITVECTOR (((PFM_MAX_PMCS) + 64 - 1) / 64)
#define PFM_MAX_PMD_BITVECTOR (((PFM_MAX_PMDS) + 64 - 1) / 64)

/* Whether reg_flags or set_flags tell of an error (3.1.2, 3.1.10). */
#define PFM_REG_HAS_ERROR(flags) ((flags) & PFM_REG_RETFL_MASK)
#define PFM_SET_HAS_ERROR(flags) ((flags) & PFM_SET_RETFL_MASK)

/* The two halves of a version (3.1.17). */
#define PFM_VERSION_MAJOR(m) (((m) >> 16) & 0xffff)
#define PFM_VERSION_MINOR(m) ((m) & 0xffff)

/* How the value of a PMD was counted, from reg_flags after PFM_READ_PMDS. */
#define PFM_REG_PROV(flags) (((flags) & PFM_REG_RETFL_PROV_MASK) >> PFM_REG_RETFL_PROV_SHIFT)

/* A UUID (3.5.2). */
typedef unsigned char pfm_uuid_t[16];
";

const UNION: &str = r"
/* A message of any type (3.3.2). */
typedef union {
	uint32_t msg_type; /* PFM_MSG_* */
	pfm_ovfl_msg_t pfm_ovfl_msg;
} pfm_msg_t;
";

const END: &str = r#"
/*
 * Calls (3.1, 6.1). 0, or -1 with errno. They speak to the socket that the
 * environment variable UMPIRE_PERFMON names.
 */
int perfmonctl(int fd, int cmd, void *arg, int nargs);
int pfm_create_context(pfarg_ctx_t *ctx, int n);
int pfm_write_pmcs(int fd, pfarg_pmc_t *pmcs, int n);
int pfm_write_pmds(int fd, pfarg_pmd_t *pmds, int n);
int pfm_read_pmds(int fd, pfarg_pmd_t *pmds, int n);
int pfm_start(int fd, pfarg_start_t *start);
int pfm_stop(int fd);
int pfm_load_context(int fd, pfarg_load_t *load);
int pfm_unload_context(int fd);
int pfm_restart(int fd);
int pfm_create_evtsets(int fd, pfarg_setdesc_t *setdesc, int n);
int pfm_delete_evtsets(int fd, pfarg_setdesc_t *setdesc, int n);
/* 6.1.7 has pfarg_setdesc_t here, by mistake: 3.1.12 defines the argument. */
int pfm_getinfo_evtsets(int fd, pfarg_setinfo_t *setinfo, int n);
int pfm_getinfo_pmcs(pfarg_pmcinfo_t *pmcs, int n);
int pfm_getinfo_pmds(pfarg_pmdinfo_t *pmds, int n);
int pfm_get_config(pfarg_config_t *cfg);
int pfm_set_config(pfarg_config_t *cfg);

/*
 * Why the last call of this thread failed, one line; "" if it did not. The text
 * is valid until the thread's next call.
 */
const char *pfm_strerror_last(void);

/* Other names that the specification itself uses, in the sections at the right. */
#ifndef PFM_NO_COMPAT
#define PFM_CONTEXT_CREATE PFM_CREATE_CONTEXT /* 3.5.3 */
#define PFM_CONTEXT_UNLOAD PFM_UNLOAD_CONTEXT /* 3.1.7 */
#define PFM_OVFL_NO_MSG PFM_FL_OVFL_NO_MSG /* 3.4.3 */
#define PFM_FL_OVFL_BLOCK PFM_FL_NOTIFY_BLOCK /* 3.5.14 */
#define PFM_OVFLMSG PFM_MSG_OVFL /* 3.3.3 */
#define PFM_OVFL_MSG PFM_MSG_OVFL /* 3.6.5 */
#define PFM_ENDMSG PFM_MSG_END /* 3.3.3 */
#define PFM_END_MSG PFM_MSG_END /* 3.3.6 */
#define DOUBLE_FMT_MASK_WHEN_FULL PFM_DOUBLE_FMT_MASK_WHEN_FULL /* 6.3.1 */
#define ctx_smpl_uuid ctx_smpl_buf_id /* 3.5.2 */
#define ct_smpl_buf_size ctx_smpl_buf_size /* 3.5.4 */
#define reg_last_reset reg_last_reset_val /* 3.4.2 */
#define set_active_duration set_act_duration /* 3.1.12 */
#define cf_sys_group cf_sys_gid /* 4.2 */
#define cf_thread_group cf_thread_gid /* 4.2 */
#define hdr_cur_pos hdr_cur_offs /* 3.6.5 */
typedef pfm_msg_t pfmon_msg_t; /* 3.3.3 */
#endif

#ifdef __cplusplus
}
#endif

#endif /* UMPIRE_PERFMON_H */
"#;

const UUIDS: [(&str, [u8; 16]); 3] = [
    ("PFM_DEFAULT_SMPL_UUID", consts::DEFAULT_FORMAT),
    ("PFM_DOUBLE_SMPL_UUID", consts::DOUBLE_FORMAT),
    ("PFM_COMPACT_SMPL_UUID", consts::COMPACT_FORMAT),
];

fn constant(name: &str, value: u64) -> String {
    let bits = ["FL_", "MASK", "_HDR", "GROUP", "_MSG_", "_TYPE_"];
    let decimal = name.ends_with("_SHIFT");
    let suffix = match u32::try_from(value) {
        Ok(small) if i32::try_from(small).is_ok() => "",
        Ok(_) => "U",
        Err(_) => "ULL",
    };
    if !decimal && (value >= 0x1_0000 || bits.iter().any(|part| name.contains(part))) {
        format!("{value:#x}{suffix}")
    } else {
        format!("{value}{suffix}")
    }
}

/// `type name[N];` of a field.
fn declaration(c_type: &str, name: &str) -> String {
    match c_type.split_once('[') {
        Some((element, count)) => format!("{element} {name}[{count};"),
        None => format!("{c_type} {name};"),
    }
}

fn header() -> String {
    let mut text = BEGIN.replace("\\x22", "\"") + "\n";
    for (name, value, meaning) in consts::ALL {
        let value = constant(name, *value);
        writeln!(text, "#define {name} {value} /* {meaning} */").unwrap();
    }
    text.push_str(MACROS);
    for (c_name, _, meaning, fields) in records::ALL {
        writeln!(text, "\n/* {meaning} */\ntypedef struct {{").unwrap();
        for field in *fields {
            let declaration = declaration(field.c_type, field.name);
            writeln!(text, "\t{declaration} /* {} */", field.text).unwrap();
        }
        writeln!(text, "}} {c_name};").unwrap();
        if *c_name == Message::NAME {
            text.push_str(UNION);
        }
    }
    text.push_str("\n/* UUIDs of the built-in sampling formats (3.6.1, 6.3.1). */\n");
    for (name, uuid) in UUIDS {
        let bytes: Vec<_> = uuid.iter().map(|byte| format!("{byte:#04x}")).collect();
        writeln!(text, "#define {name} {{ {} }}", bytes.join(", ")).unwrap();
    }
    text + END
}

fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

#[test]
fn the_header_follows_the_tables() {
    let (path, expected) = (path(HEADER), header());
    if std::env::var_os("UPDATE_ABI").is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "perfmon/include/perfmon.h is not what the tables say; UPDATE_ABI=1 cargo test -p perfmon-abi --test header"
    );
}

/// A C program that compares the compiler's layout and values with the tables'.
fn layout_program() -> String {
    let mut checks = String::new();
    let mut check = |what: &str, value: String| {
        let name = what.replace('"', "");
        writeln!(
            checks,
            "\tbad += check(\"{name}\", (unsigned long long)({what}), {value});"
        )
        .unwrap();
    };
    for (c_name, size, _, fields) in records::ALL {
        check(&format!("sizeof({c_name})"), format!("{size}ULL"));
        for field in *fields {
            let (name, c_name) = (field.name, *c_name);
            check(
                &format!("offsetof({c_name}, {name})"),
                format!("{}ULL", field.offset),
            );
            check(
                &format!("sizeof((({c_name} *)0)->{name})"),
                format!("{}ULL", field.size),
            );
        }
    }
    check("sizeof(pfm_msg_t)", format!("{}ULL", Message::SIZE));
    check("offsetof(pfm_msg_t, pfm_ovfl_msg.msg_type)", "0ULL".into());
    for (name, value, _) in consts::ALL {
        check(name, format!("{value}ULL"));
    }
    check(
        "PFM_MAX_PMC_BITVECTOR",
        format!("{}ULL", perfmon_abi::PMC_WORDS),
    );
    check(
        "PFM_MAX_PMD_BITVECTOR",
        format!("{}ULL", perfmon_abi::PMD_WORDS),
    );
    check("PFM_VERSION_MAJOR(PFM_VERSION)", "0ULL".into());
    check("PFM_VERSION_MINOR(PFM_VERSION)", "6ULL".into());
    check("!PFM_REG_HAS_ERROR(PFM_REG_RETFL_NOSET)", "0ULL".into());
    check("PFM_REG_HAS_ERROR(PFM_REG_RETFL_PROV_MASK)", "0ULL".into());
    check("!PFM_SET_HAS_ERROR(PFM_SET_RETFL_EINVAL)", "0ULL".into());
    check(
        "PFM_REG_PROV(PFM_PROV_LOST << PFM_REG_RETFL_PROV_SHIFT)",
        "7ULL".into(),
    );
    for (name, uuid) in UUIDS {
        writeln!(checks, "\t{{\n\t\tpfm_uuid_t uuid = {name};").unwrap();
        for (index, byte) in iter::zip(0.., uuid) {
            writeln!(
                checks,
                "\t\tbad += check(\"{name}\", uuid[{index}], {byte}ULL);"
            )
            .unwrap();
        }
        writeln!(checks, "\t}}").unwrap();
    }
    format!(
        r#"#include <perfmon.h>
#include <stdio.h>

static int check(const char *what, unsigned long long found, unsigned long long expected)
{{
	if (found == expected)
		return 0;
	printf("%s is %llu, the table says %llu\n", what, found, expected);
	return 1;
}}

int main(void)
{{
	int bad = 0;
	pfmon_msg_t message;

	message.msg_type = PFM_OVFLMSG;
	bad += check("msg_type", message.pfm_ovfl_msg.msg_type, PFM_OVFL_MSG);
{checks}	return bad != 0;
}}
"#
    )
}

fn check_layout(compiler: &str, standard: &str, extension: &str) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("layout").with_extension(extension);
    let program = folder.path().join("layout");
    fs::write(&source, layout_program()).unwrap();
    let built = Command::new(compiler)
        .args([standard, "-D_POSIX_C_SOURCE=200809L", "-pedantic"])
        .args(["-Wall", "-Wextra", "-Werror", "-I"])
        .arg(path("../include"))
        .args([&source, Path::new("-o"), &program])
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    let errors = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{compiler} {standard}: {errors}");
    let ran = Command::new(&program).output().unwrap();
    let found = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{compiler} {standard}: {found}");
}

#[test]
fn a_c_compiler_agrees_with_the_tables() {
    check_layout("cc", "-std=c99", "c");
    check_layout("cc", "-std=gnu17", "c");
}

#[test]
fn a_cpp_compiler_agrees_with_the_tables() {
    check_layout("c++", "-std=c++11", "cpp");
}
