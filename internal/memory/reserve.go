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

// ReleaseUnused returns memory of an idle process to the kernel. If worked is true, which means
// that the process was busy before, it runs a garbage collection and releases freed heap memory. It
// always calls UnmapProgram and ignores its error.
func ReleaseUnused(worked bool) {
	if worked {
		debug.FreeOSMemory()
	}
	_ = UnmapProgram()
}

// UnmapProgram unmaps the read-only pages of the program's executable: code, constants and runtime
// tables. They stay in the page cache, which the kernel reclaims first, and no longer count as
// memory of this process. A page that is used again causes a minor fault, which maps 64 KiB. Most
// pages that are mapped at startup are never used again, for example those for package
// initialization.
func UnmapProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("reading the path of the program: %w", err)
	}
	raw, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return fmt.Errorf("reading the process's mappings: %w", err)
	}
	var failed []error
	for _, m := range programMappings(raw, program) {
		if _, _, errno := syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, syscall.MADV_DONTNEED); errno !=
			0 {
			failed = append(failed, fmt.Errorf("unmapping %x-%x of %s: %w", m.start, m.end, program, errno))
		}
	}
	return errors.Join(failed...)
}

// mapping is a range of memory addresses; end is exclusive.
type mapping struct{ start, end uintptr }

// programMappings returns the private, read-only mappings of a file. maps is the content of
// /proc/PID/maps. Each page of these mappings can be read from the file again.
func programMappings(maps []byte, file string) (out []mapping) {
	for lines := bufio.NewScanner(bytes.NewReader(maps)); lines.Scan(); {
		// 00400000-02261000 r-xp 00000000 fe:00 1234567                /usr/bin/program (deleted)
		f := strings.Fields(lines.Text())
		if len(f) < 6 || strings.Join(f[5:], " ") != file || strings.Contains(f[1], "w") ||
			!strings.HasSuffix(f[1], "p") {
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
