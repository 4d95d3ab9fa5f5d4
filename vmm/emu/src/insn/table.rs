//! The table of operations: each stands here once, with its handler.

/// Gives the table to a macro.
macro_rules! operations {
    ($to:ident) => {
        $to! {
            widths {
                Alu alu::binary(ADD, RR): AddRr8 AddRr16 AddRr32 AddRr64;
                Alu alu::binary(ADD, RI): AddRi8 AddRi16 AddRi32 AddRi64;
                Alu alu::binary(ADD, RM): AddRm8 AddRm16 AddRm32 AddRm64;
                Alu alu::binary(ADD, MR): AddMr8 AddMr16 AddMr32 AddMr64;
                Alu alu::binary(ADD, MI): AddMi8 AddMi16 AddMi32 AddMi64;
                Alu alu::binary(OR, RR): OrRr8 OrRr16 OrRr32 OrRr64;
                Alu alu::binary(OR, RI): OrRi8 OrRi16 OrRi32 OrRi64;
                Alu alu::binary(OR, RM): OrRm8 OrRm16 OrRm32 OrRm64;
                Alu alu::binary(OR, MR): OrMr8 OrMr16 OrMr32 OrMr64;
                Alu alu::binary(OR, MI): OrMi8 OrMi16 OrMi32 OrMi64;
                Alu alu::binary(ADC, RR): AdcRr8 AdcRr16 AdcRr32 AdcRr64;
                Alu alu::binary(ADC, RI): AdcRi8 AdcRi16 AdcRi32 AdcRi64;
                Alu alu::binary(ADC, RM): AdcRm8 AdcRm16 AdcRm32 AdcRm64;
                Alu alu::binary(ADC, MR): AdcMr8 AdcMr16 AdcMr32 AdcMr64;
                Alu alu::binary(ADC, MI): AdcMi8 AdcMi16 AdcMi32 AdcMi64;
                Alu alu::binary(SBB, RR): SbbRr8 SbbRr16 SbbRr32 SbbRr64;
                Alu alu::binary(SBB, RI): SbbRi8 SbbRi16 SbbRi32 SbbRi64;
                Alu alu::binary(SBB, RM): SbbRm8 SbbRm16 SbbRm32 SbbRm64;
                Alu alu::binary(SBB, MR): SbbMr8 SbbMr16 SbbMr32 SbbMr64;
                Alu alu::binary(SBB, MI): SbbMi8 SbbMi16 SbbMi32 SbbMi64;
                Alu alu::binary(AND, RR): AndRr8 AndRr16 AndRr32 AndRr64;
                Alu alu::binary(AND, RI): AndRi8 AndRi16 AndRi32 AndRi64;
                Alu alu::binary(AND, RM): AndRm8 AndRm16 AndRm32 AndRm64;
                Alu alu::binary(AND, MR): AndMr8 AndMr16 AndMr32 AndMr64;
                Alu alu::binary(AND, MI): AndMi8 AndMi16 AndMi32 AndMi64;
                Alu alu::binary(SUB, RR): SubRr8 SubRr16 SubRr32 SubRr64;
                Alu alu::binary(SUB, RI): SubRi8 SubRi16 SubRi32 SubRi64;
                Alu alu::binary(SUB, RM): SubRm8 SubRm16 SubRm32 SubRm64;
                Alu alu::binary(SUB, MR): SubMr8 SubMr16 SubMr32 SubMr64;
                Alu alu::binary(SUB, MI): SubMi8 SubMi16 SubMi32 SubMi64;
                Alu alu::binary(XOR, RR): XorRr8 XorRr16 XorRr32 XorRr64;
                Alu alu::binary(XOR, RI): XorRi8 XorRi16 XorRi32 XorRi64;
                Alu alu::binary(XOR, RM): XorRm8 XorRm16 XorRm32 XorRm64;
                Alu alu::binary(XOR, MR): XorMr8 XorMr16 XorMr32 XorMr64;
                Alu alu::binary(XOR, MI): XorMi8 XorMi16 XorMi32 XorMi64;
                Alu alu::binary(CMP, RR): CmpRr8 CmpRr16 CmpRr32 CmpRr64;
                Alu alu::binary(CMP, RI): CmpRi8 CmpRi16 CmpRi32 CmpRi64;
                Alu alu::binary(CMP, RM): CmpRm8 CmpRm16 CmpRm32 CmpRm64;
                Alu alu::binary(CMP, MR): CmpMr8 CmpMr16 CmpMr32 CmpMr64;
                Alu alu::binary(CMP, MI): CmpMi8 CmpMi16 CmpMi32 CmpMi64;
                Alu alu::binary(TEST, RR): TestRr8 TestRr16 TestRr32 TestRr64;
                Alu alu::binary(TEST, RI): TestRi8 TestRi16 TestRi32 TestRi64;
                Alu alu::binary(TEST, MR): TestMr8 TestMr16 TestMr32 TestMr64;
                Alu alu::binary(TEST, MI): TestMi8 TestMi16 TestMi32 TestMi64;
                Mov mem::mov(RR): MovRr8 MovRr16 MovRr32 MovRr64;
                Mov mem::mov(RI): MovRi8 MovRi16 MovRi32 MovRi64;
                Mov mem::mov(RM): MovRm8 MovRm16 MovRm32 MovRm64;
                Mov mem::mov(MR): MovMr8 MovMr16 MovMr32 MovMr64;
                Mov mem::mov(MI): MovMi8 MovMi16 MovMi32 MovMi64;
                Unary alu::unary(INC, RR): IncR8 IncR16 IncR32 IncR64;
                Unary alu::unary(INC, MR): IncM8 IncM16 IncM32 IncM64;
                Unary alu::unary(DEC, RR): DecR8 DecR16 DecR32 DecR64;
                Unary alu::unary(DEC, MR): DecM8 DecM16 DecM32 DecM64;
                Unary alu::unary(NEG, RR): NegR8 NegR16 NegR32 NegR64;
                Unary alu::unary(NEG, MR): NegM8 NegM16 NegM32 NegM64;
                Unary alu::unary(NOT, RR): NotR8 NotR16 NotR32 NotR64;
                Unary alu::unary(NOT, MR): NotM8 NotM16 NotM32 NotM64;
                Shift shift::shift(ROL, RI): RolImm8 RolImm16 RolImm32 RolImm64;
                Shift shift::shift(ROL, RR): RolCl8 RolCl16 RolCl32 RolCl64;
                Shift shift::shift(ROR, RI): RorImm8 RorImm16 RorImm32 RorImm64;
                Shift shift::shift(ROR, RR): RorCl8 RorCl16 RorCl32 RorCl64;
                Shift shift::shift(SHL, RI): ShlImm8 ShlImm16 ShlImm32 ShlImm64;
                Shift shift::shift(SHL, RR): ShlCl8 ShlCl16 ShlCl32 ShlCl64;
                Shift shift::shift(SHR, RI): ShrImm8 ShrImm16 ShrImm32 ShrImm64;
                Shift shift::shift(SHR, RR): ShrCl8 ShrCl16 ShrCl32 ShrCl64;
                Shift shift::shift(SAR, RI): SarImm8 SarImm16 SarImm32 SarImm64;
                Shift shift::shift(SAR, RR): SarCl8 SarCl16 SarCl32 SarCl64;
                MulDiv muldiv::one(MUL, RR): MulR8 MulR16 MulR32 MulR64;
                MulDiv muldiv::one(MUL, RM): MulM8 MulM16 MulM32 MulM64;
                MulDiv muldiv::one(IMUL, RR): ImulR8 ImulR16 ImulR32 ImulR64;
                MulDiv muldiv::one(IMUL, RM): ImulM8 ImulM16 ImulM32 ImulM64;
                MulDiv muldiv::one(DIV, RR): DivR8 DivR16 DivR32 DivR64;
                MulDiv muldiv::one(DIV, RM): DivM8 DivM16 DivM32 DivM64;
                MulDiv muldiv::one(IDIV, RR): IdivR8 IdivR16 IdivR32 IdivR64;
                MulDiv muldiv::one(IDIV, RM): IdivM8 IdivM16 IdivM32 IdivM64;
                Xchg mem::xchg(RR): XchgRr8 XchgRr16 XchgRr32 XchgRr64;
            }
            words {
                Imul muldiv::two(RR): Imul2Rr16 Imul2Rr32 Imul2Rr64;
                ImulImm muldiv::three(RR): Imul3Rr16 Imul3Rr32 Imul3Rr64;
                Imul muldiv::two(RM): Imul2Rm16 Imul2Rm32 Imul2Rm64;
                ImulImm muldiv::three(RM): Imul3Rm16 Imul3Rm32 Imul3Rm64;
                Bt bits::bt(RR): BtRr16 BtRr32 BtRr64;
                Bt bits::bt(RI): BtRi16 BtRi32 BtRi64;
            }
            conditions {
                Jcc branch::jcc(): JO JNo JB JAe JE JNe JBe JA JS JNs JP JNp JL JGe JLe JG;
                Compare8 branch::compare8(CMP, RI): CmpRi8JO CmpRi8JNo CmpRi8JB CmpRi8JAe CmpRi8JE CmpRi8JNe CmpRi8JBe CmpRi8JA CmpRi8JS CmpRi8JNs CmpRi8JP CmpRi8JNp CmpRi8JL CmpRi8JGe CmpRi8JLe CmpRi8JG;
                Compare8 branch::compare8(TEST, RR): TestRr8JO TestRr8JNo TestRr8JB TestRr8JAe TestRr8JE TestRr8JNe TestRr8JBe TestRr8JA TestRr8JS TestRr8JNs TestRr8JP TestRr8JNp TestRr8JL TestRr8JGe TestRr8JLe TestRr8JG;
                Compare8 branch::compare8(TEST, RI): TestRi8JO TestRi8JNo TestRi8JB TestRi8JAe TestRi8JE TestRi8JNe TestRi8JBe TestRi8JA TestRi8JS TestRi8JNs TestRi8JP TestRi8JNp TestRi8JL TestRi8JGe TestRi8JLe TestRi8JG;
                Compare32 branch::compare32(CMP, RR): CmpRr32JO CmpRr32JNo CmpRr32JB CmpRr32JAe CmpRr32JE CmpRr32JNe CmpRr32JBe CmpRr32JA CmpRr32JS CmpRr32JNs CmpRr32JP CmpRr32JNp CmpRr32JL CmpRr32JGe CmpRr32JLe CmpRr32JG;
                Compare32 branch::compare32(CMP, RI): CmpRi32JO CmpRi32JNo CmpRi32JB CmpRi32JAe CmpRi32JE CmpRi32JNe CmpRi32JBe CmpRi32JA CmpRi32JS CmpRi32JNs CmpRi32JP CmpRi32JNp CmpRi32JL CmpRi32JGe CmpRi32JLe CmpRi32JG;
                Compare32 branch::compare32(TEST, RR): TestRr32JO TestRr32JNo TestRr32JB TestRr32JAe TestRr32JE TestRr32JNe TestRr32JBe TestRr32JA TestRr32JS TestRr32JNs TestRr32JP TestRr32JNp TestRr32JL TestRr32JGe TestRr32JLe TestRr32JG;
                Compare32 branch::compare32(TEST, RI): TestRi32JO TestRi32JNo TestRi32JB TestRi32JAe TestRi32JE TestRi32JNe TestRi32JBe TestRi32JA TestRi32JS TestRi32JNs TestRi32JP TestRi32JNp TestRi32JL TestRi32JGe TestRi32JLe TestRi32JG;
                Compare64 branch::compare64(CMP, RR): CmpRr64JO CmpRr64JNo CmpRr64JB CmpRr64JAe CmpRr64JE CmpRr64JNe CmpRr64JBe CmpRr64JA CmpRr64JS CmpRr64JNs CmpRr64JP CmpRr64JNp CmpRr64JL CmpRr64JGe CmpRr64JLe CmpRr64JG;
                Compare64 branch::compare64(CMP, RI): CmpRi64JO CmpRi64JNo CmpRi64JB CmpRi64JAe CmpRi64JE CmpRi64JNe CmpRi64JBe CmpRi64JA CmpRi64JS CmpRi64JNs CmpRi64JP CmpRi64JNp CmpRi64JL CmpRi64JGe CmpRi64JLe CmpRi64JG;
                Compare64 branch::compare64(TEST, RR): TestRr64JO TestRr64JNo TestRr64JB TestRr64JAe TestRr64JE TestRr64JNe TestRr64JBe TestRr64JA TestRr64JS TestRr64JNs TestRr64JP TestRr64JNp TestRr64JL TestRr64JGe TestRr64JLe TestRr64JG;
                Set alu::set(RR): SetO SetNo SetB SetAe SetE SetNe SetBe SetA SetS SetNs SetP SetNp SetL SetGe SetLe SetG;
                Set alu::set(MR): SetMO SetMNo SetMB SetMAe SetME SetMNe SetMBe SetMA SetMS SetMNs SetMP SetMNp SetML SetMGe SetMLe SetMG;
                Cmov16 mem::cmov16(RR): Cmov16RrO Cmov16RrNo Cmov16RrB Cmov16RrAe Cmov16RrE Cmov16RrNe Cmov16RrBe Cmov16RrA Cmov16RrS Cmov16RrNs Cmov16RrP Cmov16RrNp Cmov16RrL Cmov16RrGe Cmov16RrLe Cmov16RrG;
                Cmov32 mem::cmov32(RR): Cmov32RrO Cmov32RrNo Cmov32RrB Cmov32RrAe Cmov32RrE Cmov32RrNe Cmov32RrBe Cmov32RrA Cmov32RrS Cmov32RrNs Cmov32RrP Cmov32RrNp Cmov32RrL Cmov32RrGe Cmov32RrLe Cmov32RrG;
                Cmov64 mem::cmov64(RR): Cmov64RrO Cmov64RrNo Cmov64RrB Cmov64RrAe Cmov64RrE Cmov64RrNe Cmov64RrBe Cmov64RrA Cmov64RrS Cmov64RrNs Cmov64RrP Cmov64RrNp Cmov64RrL Cmov64RrGe Cmov64RrLe Cmov64RrG;
                Cmov16 mem::cmov16(RM): Cmov16RmO Cmov16RmNo Cmov16RmB Cmov16RmAe Cmov16RmE Cmov16RmNe Cmov16RmBe Cmov16RmA Cmov16RmS Cmov16RmNs Cmov16RmP Cmov16RmNp Cmov16RmL Cmov16RmGe Cmov16RmLe Cmov16RmG;
                Cmov32 mem::cmov32(RM): Cmov32RmO Cmov32RmNo Cmov32RmB Cmov32RmAe Cmov32RmE Cmov32RmNe Cmov32RmBe Cmov32RmA Cmov32RmS Cmov32RmNs Cmov32RmP Cmov32RmNp Cmov32RmL Cmov32RmGe Cmov32RmLe Cmov32RmG;
                Cmov64 mem::cmov64(RM): Cmov64RmO Cmov64RmNo Cmov64RmB Cmov64RmAe Cmov64RmE Cmov64RmNe Cmov64RmBe Cmov64RmA Cmov64RmS Cmov64RmNs Cmov64RmP Cmov64RmNp Cmov64RmL Cmov64RmGe Cmov64RmLe Cmov64RmG;
            }
            quiet {
                alu::quiet(ADD, RR) All: AddRr32 AddRr64 => QuietAddRr32 QuietAddRr64;
                alu::quiet(ADD, RI) All: AddRi32 AddRi64 => QuietAddRi32 QuietAddRi64;
                alu::quiet(SUB, RR) All: SubRr32 SubRr64 => QuietSubRr32 QuietSubRr64;
                alu::quiet(SUB, RI) All: SubRi32 SubRi64 => QuietSubRi32 QuietSubRi64;
                alu::quiet(AND, RR) All: AndRr32 AndRr64 => QuietAndRr32 QuietAndRr64;
                alu::quiet(AND, RI) All: AndRi32 AndRi64 => QuietAndRi32 QuietAndRi64;
                alu::quiet(OR, RR) All: OrRr32 OrRr64 => QuietOrRr32 QuietOrRr64;
                alu::quiet(OR, RI) All: OrRi32 OrRi64 => QuietOrRi32 QuietOrRi64;
                alu::quiet(XOR, RR) All: XorRr32 XorRr64 => QuietXorRr32 QuietXorRr64;
                alu::quiet(XOR, RI) All: XorRi32 XorRi64 => QuietXorRi32 QuietXorRi64;
                alu::quiet_unary(INC, RR) Some: IncR32 IncR64 => QuietIncR32 QuietIncR64;
                alu::quiet_unary(DEC, RR) Some: DecR32 DecR64 => QuietDecR32 QuietDecR64;
                alu::quiet_unary(NEG, RR) All: NegR32 NegR64 => QuietNegR32 QuietNegR64;
                shift::quiet(SHL, RI) All: ShlImm32 ShlImm64 => QuietShlImm32 QuietShlImm64;
                shift::quiet(SHR, RI) All: ShrImm32 ShrImm64 => QuietShrImm32 QuietShrImm64;
                shift::quiet(SAR, RI) All: SarImm32 SarImm64 => QuietSarImm32 QuietSarImm64;
                shift::quiet(ROL, RI) Some: RolImm32 RolImm64 => QuietRolImm32 QuietRolImm64;
                shift::quiet(ROR, RI) Some: RorImm32 RorImm64 => QuietRorImm32 QuietRorImm64;
            }
            single {
                Movzx8To16Rr = mem::extend::<u8, u16, { RR }, false>;
                Movsx8To16Rr = mem::extend::<u8, u16, { RR }, true>;
                Movzx8To16Rm = mem::extend::<u8, u16, { RM }, false>;
                Movsx8To16Rm = mem::extend::<u8, u16, { RM }, true>;
                Movzx8To32Rr = mem::extend::<u8, u32, { RR }, false>;
                Movsx8To32Rr = mem::extend::<u8, u32, { RR }, true>;
                Movzx8To32Rm = mem::extend::<u8, u32, { RM }, false>;
                Movsx8To32Rm = mem::extend::<u8, u32, { RM }, true>;
                Movzx8To64Rr = mem::extend::<u8, u64, { RR }, false>;
                Movsx8To64Rr = mem::extend::<u8, u64, { RR }, true>;
                Movzx8To64Rm = mem::extend::<u8, u64, { RM }, false>;
                Movsx8To64Rm = mem::extend::<u8, u64, { RM }, true>;
                Movzx16To32Rr = mem::extend::<u16, u32, { RR }, false>;
                Movsx16To32Rr = mem::extend::<u16, u32, { RR }, true>;
                Movzx16To32Rm = mem::extend::<u16, u32, { RM }, false>;
                Movsx16To32Rm = mem::extend::<u16, u32, { RM }, true>;
                Movzx16To64Rr = mem::extend::<u16, u64, { RR }, false>;
                Movsx16To64Rr = mem::extend::<u16, u64, { RR }, true>;
                Movzx16To64Rm = mem::extend::<u16, u64, { RM }, false>;
                Movsx16To64Rm = mem::extend::<u16, u64, { RM }, true>;
                Movsx32To64Rr = mem::extend::<u32, u64, { RR }, true>;
                Movsx32To64Rm = mem::extend::<u32, u64, { RM }, true>;
                Lea32 = mem::lea::<u32>;
                Lea64 = mem::lea::<u64>;
                PushR = mem::push::<{ RR }>;
                PushI = mem::push::<{ RI }>;
                PushM = mem::push::<{ RM }>;
                PopR = mem::pop;
                Leave = mem::leave;
                JmpRel = branch::jmp::<{ RI }>;
                JmpR = branch::jmp::<{ RR }>;
                JmpM = branch::jmp::<{ RM }>;
                CallRel = branch::call::<{ RI }>;
                CallR = branch::call::<{ RR }>;
                CallM = branch::call::<{ RM }>;
                Ret = branch::ret;
                Nop = mem::nop;
                Cwde = alu::sign_ax::<u16, u32>;
                Cdqe = alu::sign_ax::<u32, u64>;
                Cdq = alu::sign_dx::<u32>;
                Cqo = alu::sign_dx::<u64>;
                Bswap32 = alu::bswap::<u32>;
                Bswap64 = alu::bswap::<u64>;
                XmmCopy = moves::copy;
                XmmLoad = moves::load::<false>;
                XmmLoadAligned = moves::load::<true>;
                XmmStore = moves::store::<false>;
                XmmStoreAligned = moves::store::<true>;
                XmmLoad32 = moves::load_low::<u32>;
                XmmLoad64 = moves::load_low::<u64>;
                XmmStore32 = moves::store_low::<u32>;
                XmmStore64 = moves::store_low::<u64>;
                Vector = vector::quick;
                Slow = |core, op| slow::kept(core, op, SlowPath::Integer, slow::step);
                String = |core, op| slow::kept(core, op, SlowPath::String, strings::step);
                System = |core, op| slow::kept(core, op, SlowPath::System, system::step);
                VectorSlow = |core, op| slow::kept(core, op, SlowPath::Sse, vector::step);
                Mmx = |core, op| slow::kept(core, op, SlowPath::Mmx, vector::mmx::step);
                Image = |core, op| slow::kept(core, op, SlowPath::Image, image::step);
                X87 = |core, op| slow::kept(core, op, SlowPath::X87, x87::step);
                Legacy = |core, op| slow::kept(core, op, SlowPath::Legacy, legacy::step);
                Ud = slow::undefined;
                TooLong = slow::too_long;
                Absent = slow::absent;
            }
        }
    };
}
pub(super) use operations;

/// Makes of the table the numbers of operations.
macro_rules! numbers {
    (
        widths { $($pick:ident $path:ident::$fn:ident($($arg:ident),*):
            $n8:ident $n16:ident $n32:ident $n64:ident;)* }
        words { $($wpick:ident $wpath:ident::$wfn:ident($($warg:ident),*):
            $w16:ident $w32:ident $w64:ident;)* }
        conditions { $($cond:ident $cpath:ident::$cfn:ident($($carg:ident),*):
            $c0:ident $c1:ident $c2:ident $c3:ident $c4:ident $c5:ident $c6:ident $c7:ident
            $c8:ident $c9:ident $c10:ident $c11:ident $c12:ident $c13:ident $c14:ident $c15:ident;)* }
        quiet { $($qpath:ident::$qfn:ident($($qarg:ident),*) $which:ident:
            $of32:ident $of64:ident => $q32:ident $q64:ident;)* }
        single { $($one:ident = $handler:expr;)* }
    ) => {
        /// What an operation does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        pub(crate) enum K {
            $($n8, $n16, $n32, $n64,)*
            $($w16, $w32, $w64,)*
            $($c0, $c1, $c2, $c3, $c4, $c5, $c6, $c7,
              $c8, $c9, $c10, $c11, $c12, $c13, $c14, $c15,)*
            $($q32, $q64,)*
            $($one,)*
        }

        impl K {
            /// Every operation by its number.
            #[cfg(test)]
            pub(crate) const ALL: &'static [K] = &[
                $(K::$n8, K::$n16, K::$n32, K::$n64,)*
                $(K::$w16, K::$w32, K::$w64,)*
                $(K::$c0, K::$c1, K::$c2, K::$c3, K::$c4, K::$c5, K::$c6, K::$c7,
                  K::$c8, K::$c9, K::$c10, K::$c11, K::$c12, K::$c13, K::$c14, K::$c15,)*
                $(K::$q32, K::$q64,)*
                $(K::$one,)*
            ];

            /// What does the same but for the flags, and which of these it leaves to it.
            pub(crate) fn quiet(self) -> Option<(K, Sets)> {
                match self {
                    $(K::$of32 => Some((K::$q32, Sets::$which)),
                    K::$of64 => Some((K::$q64, Sets::$which)),)*
                    _ => None,
                }
            }

            /// The bits of the register that it makes of `base`, if beside that it does no more
            /// than set flags.
            pub(crate) fn bits_from_base(self) -> Option<u32> {
                match self {
                    $(K::$of32 | K::$q32 => Some(32),
                    K::$of64 | K::$q64 => Some(64),)*
                    _ => None,
                }
            }
        }
    };
}

operations!(numbers);

/// Which flags an operation sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sets {
    /// Each of them, whatever they were.
    All,
    /// Some; the others are what they were.
    Some,
}

/// MOVZX, MOVSX and MOVSXD by the widths 0 to 3 of source and destination.
pub(crate) fn extend(from: usize, to: usize, memory: bool, signed: bool) -> Option<K> {
    let [register, in_memory] = match (from, to, signed) {
        (0, 1, false) => [K::Movzx8To16Rr, K::Movzx8To16Rm],
        (0, 2, false) => [K::Movzx8To32Rr, K::Movzx8To32Rm],
        (0, 3, false) => [K::Movzx8To64Rr, K::Movzx8To64Rm],
        (1, 2, false) => [K::Movzx16To32Rr, K::Movzx16To32Rm],
        (1, 3, false) => [K::Movzx16To64Rr, K::Movzx16To64Rm],
        (0, 1, true) => [K::Movsx8To16Rr, K::Movsx8To16Rm],
        (0, 2, true) => [K::Movsx8To32Rr, K::Movsx8To32Rm],
        (0, 3, true) => [K::Movsx8To64Rr, K::Movsx8To64Rm],
        (1, 2, true) => [K::Movsx16To32Rr, K::Movsx16To32Rm],
        (1, 3, true) => [K::Movsx16To64Rr, K::Movsx16To64Rm],
        (2, 3, true) => [K::Movsx32To64Rr, K::Movsx32To64Rm],
        _ => return None,
    };
    Some(if memory { in_memory } else { register })
}
