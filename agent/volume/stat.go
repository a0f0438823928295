package volume

import (
	"os"
	"syscall"
)

// groupOf is the owning group of a file, -1 where the system does not tell.
func groupOf(st os.FileInfo) int64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int64(s.Gid)
	}
	return -1
}
