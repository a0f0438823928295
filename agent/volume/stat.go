package volume

import (
	"os"
	"syscall"
)

// fileGroup returns the ID of the group that owns a file, or -1 if it is unknown.
func fileGroup(st os.FileInfo) int64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int64(s.Gid)
	}
	return -1
}
