//! The C header is what the tables say, and a C compiler agrees with the tables
//! about where each field lies.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, iter};

use perfmon_abi::{Message, Record, consts, records};

mod text;

use text::{BEGIN, END, MACROS, UNION};

const HEADER: &str = "../client/include/perfmon.h";

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
    let mut text = BEGIN.to_owned() + "\n";
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
        "pmu-virt/perfmon/client/include/perfmon.h is not what the tables say; UPDATE_ABI=1 cargo test -p perfmon-abi --test all header::"
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
    // Other names that the specification uses.
    for (other, name) in [
        ("PFM_CONTEXT_CREATE", "PFM_CREATE_CONTEXT"),
        ("PFM_CONTEXT_UNLOAD", "PFM_UNLOAD_CONTEXT"),
        ("PFM_OVFL_NO_MSG", "PFM_FL_OVFL_NO_MSG"),
        ("PFM_FL_OVFL_BLOCK", "PFM_FL_NOTIFY_BLOCK"),
        ("PFM_OVFLMSG", "PFM_MSG_OVFL"),
        ("PFM_OVFL_MSG", "PFM_MSG_OVFL"),
        ("PFM_ENDMSG", "PFM_MSG_END"),
        ("PFM_END_MSG", "PFM_MSG_END"),
        ("DOUBLE_FMT_MASK_WHEN_FULL", "PFM_DOUBLE_FMT_MASK_WHEN_FULL"),
        (
            "offsetof(pfarg_ctx_t, ctx_smpl_uuid)",
            "offsetof(pfarg_ctx_t, ctx_smpl_buf_id)",
        ),
        (
            "offsetof(pfarg_ctx_t, ct_smpl_buf_size)",
            "offsetof(pfarg_ctx_t, ctx_smpl_buf_size)",
        ),
        (
            "offsetof(pfarg_pmd_t, reg_last_reset)",
            "offsetof(pfarg_pmd_t, reg_last_reset_val)",
        ),
        (
            "offsetof(pfarg_setinfo_t, set_active_duration)",
            "offsetof(pfarg_setinfo_t, set_act_duration)",
        ),
        (
            "offsetof(pfarg_config_t, cf_sys_group)",
            "offsetof(pfarg_config_t, cf_sys_gid)",
        ),
        (
            "offsetof(pfarg_config_t, cf_thread_group)",
            "offsetof(pfarg_config_t, cf_thread_gid)",
        ),
        (
            "offsetof(pfm_default_smpl_hdr_t, hdr_cur_pos)",
            "offsetof(pfm_default_smpl_hdr_t, hdr_cur_offs)",
        ),
    ] {
        check(other, name.into());
    }
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
        .arg(path("../client/include"))
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
