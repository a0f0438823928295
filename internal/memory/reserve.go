package memory

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
)

// ReleaseUnused gives back to the kernel what a process does not need that has little to do: with worked, freed memory of the
// heap, for one collection; and always the pages of the program's own file. See Unmap. That the latter failed is no
// harm and is not told.
func ReleaseUnused(worked bool) {
	if worked {
		debug.FreeOSMemory()
	}
	_ = UnmapProgram()
}

// UnmapProgram takes the pages of the program's file that cannot be written out of this process' memory: code, constants, the
// runtime's tables. They stay in the kernel's page cache, where they count for nobody and are the first to go when
// memory is short, and what is used comes back by a minor fault, 64 KiB at a time. Most of what is mapped after a start
// is never used again: the functions that initialize a package once, and what lies within 64 KiB of them.
func UnmapProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("reading the program's name: %w", err)
	}
	raw, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return fmt.Errorf("reading what is mapped: %w", err)
	}
	var failed []error
	for _, m := range programMappings(raw, program) {
		if _, _, errno := syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, syscall.MADV_DONTNEED); errno != 0 {
			failed = append(failed, fmt.Errorf("unmapping %x-%x of %s: %w", m.start, m.end, program, errno))
		}
	}
	return errors.Join(failed...)
}

// mapping is a range of addresses, end exclusive.
type mapping struct{ start, end uintptr }

// programMappings are the private mappings of a file in /proc/PID/maps that cannot be written, so that nothing of theirs is
// in memory alone.
func programMappings(maps []byte, file string) (out []mapping) {
	for lines := bufio.NewScanner(bytes.NewReader(maps)); lines.Scan(); {
		// 00400000-02261000 r-xp 00000000 fe:00 1234567                /usr/bin/program (deleted)
		f := strings.Fields(lines.Text())
		if len(f) < 6 || strings.Join(f[5:], " ") != file || strings.Contains(f[1], "w") || !strings.HasSuffix(f[1], "p") {
			continue
		}
		first, last, _ := strings.Cut(f[0], "-")
		start, err1 := strconv.ParseUint(first, 16, 64)
		end, err2 := strconv.ParseUint(last, 16, 64)
		if err1 == nil && err2 == nil {
			out = append(out, mapping{uintptr(start), uintptr(end)})
		}
	}
	return out
}
