//! The documents of the control socket.

#[test]
fn uuids_are_written_as_rfc_9562_has_them() {
    use perfmon_abi::wire::info::{FormatInfo, uuid_text};
    let parse_uuid = |text: &str| {
        let format = FormatInfo {
            uuid: text.to_owned(),
            name: String::new(),
            flags: 0,
            arg_size: 0,
            queue_depth: 1,
            description: String::new(),
        };
        format.uuid_bytes()
    };
    let text = "4d72bec0-0664-4143-82b4-d3fd27243c97";
    assert_eq!(uuid_text(perfmon_abi::consts::DEFAULT_FORMAT), text);
    assert_eq!(parse_uuid(text), Some(perfmon_abi::consts::DEFAULT_FORMAT));
    assert_eq!(parse_uuid(&text.to_uppercase()), parse_uuid(text));
    for bad in [
        "",
        "4d72bec0-0664-4143-82b4-d3fd27243c9",
        "4d72bec006644143-82b4-d3fd-27243c97",
        "4d72bec0-0664-4143-82b4-d3fd27243cg7",
        "+d72bec0-0664-4143-82b4-d3fd27243c97",
        "4d72bec0-0664-4143-82b4-d3fd27243c97-",
        "\u{e9}d72be0-0664-4143-82b4-d3fd27243c97",
    ] {
        assert_eq!(parse_uuid(bad), None, "{bad}");
    }
}

#[test]
fn documents_survive_json_and_may_grow() {
    use perfmon_abi::wire::info::{
        ContextInfo, ContextState, CoreInfo, Holder, HolderInfo, MachineInfo, ReservedInfo, Scope,
        VcpuInfo, VcpuState,
    };
    let machine = MachineInfo {
        pid: 7,
        guest: "vmlinux".into(),
        counters: "sim".into(),
        policy: "guest-first".into(),
        vcpus: vec![VcpuInfo {
            vcpu: 0,
            state: VcpuState::Running,
            core: Some(0),
            context: None,
            contexts: Vec::new(),
            halted: Some(true),
            reserved: vec![ReservedInfo {
                counter: "PMC5".into(),
                layer: "firmware".into(),
            }],
        }],
        cores: vec![CoreInfo {
            core: 0,
            tid: 8,
            vcpu: Some(0),
            context: Some(3),
            contexts: vec![3, 5],
            counters: [
                Holder::Free,
                Holder::Guest(0),
                Holder::Context(3),
                Holder::Reserved,
            ]
            .map(|holder| HolderInfo {
                counter: "pmc0".into(),
                holder,
                event: Some(0xc0),
            })
            .into(),
            free: Some(2),
        }],
        contexts: vec![ContextInfo {
            id: 3,
            scope: Scope::Core,
            target: Some(0),
            state: ContextState::Masked,
            started: true,
            flags: 2,
            pid: 9,
            uid: 0,
            sets: 1,
            active_set: 0,
            format: None,
            buffer_size: 0,
            unread: 1,
            dropped: 0,
        }],
    };
    let text = serde_json::to_string(&machine).unwrap();
    assert_eq!(serde_json::from_str::<MachineInfo>(&text).unwrap(), machine);
    // A VM of before has no such fields.
    let new = [
        ",\"halted\":true",
        ",\"reserved\":[{\"counter\":\"PMC5\",\"layer\":\"firmware\"}]",
        ",\"free\":2",
    ];
    let earlier = new
        .iter()
        .fold(text.clone(), |text, field| text.replacen(field, "", 1));
    assert!(
        earlier.len() + new.concat().len() == text.len(),
        "{earlier}"
    );
    let earlier = serde_json::from_str::<MachineInfo>(&earlier).unwrap();
    assert_eq!(
        (earlier.vcpus[0].halted, earlier.cores[0].free),
        (None, None)
    );
    let later = text.replacen('{', "{\"new\":[1],", 1);
    assert_eq!(
        serde_json::from_str::<MachineInfo>(&later).unwrap(),
        machine
    );
}
