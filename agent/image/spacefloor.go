package image

import (
	"fmt"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/reservedspace"
)

// spaceFloor is the space and the number of inodes that must stay free on the file system of the
// store.
type spaceFloor struct {
	root   string // a folder of the file system
	bytes  reservedspace.Amount
	inodes reservedspace.Amount // if zero, the share of bytes applies to inodes too
}

// missingSpace returns how much space must be freed on the file system fs, so that more than the
// floors of bytes and inodes is free. See fileSystem.missingSpace.
func (f spaceFloor) missingSpace(fs fileSystem) diskSpace {
	want := fs.missingSpace(f.bytes)
	if f.inodes != (reservedspace.Amount{}) {
		want.inodes = fs.inodesAsBytes().missingSpace(f.inodes).bytes
	}
	return want
}

// isBelowFloor reports whether the file system fs has fewer free bytes or inodes than must stay
// free.
func (f spaceFloor) isBelowFloor(fs fileSystem) bool {
	if f.inodes == (reservedspace.Amount{}) {
		return fs.isBelowFloor(f.bytes)
	}
	return fs.withoutInodes().isBelowFloor(f.bytes) || fs.inodesAsBytes().isBelowFloor(f.inodes)
}

// statFileSystem returns the size and the free space of the file system that contains the store.
func (f spaceFloor) statFileSystem() (fileSystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(f.root, &st); err != nil {
		return fileSystem{}, fmt.Errorf("read the free space of the image store: %w", err)
	}
	return fileSystem{size: diskSpace{int64(st.Blocks) * st.Bsize, int64(st.Files)},
		free: diskSpace{int64(st.Bavail) * st.Bsize, int64(st.Ffree)}}, nil
}
