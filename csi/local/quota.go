package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// quotas holds folders to a size: what bears a project id takes so much of its file system at most. That of the kernel is
// kernelQuotas; tests that are about something else have one in memory.
type quotas interface {
	// ready is nil where the file system of a folder has project quotas in force, and else a sentence that says what is
	// missing and what to do.
	ready(root string) error
	// limit sets what may bear an id: bytes and inodes; zeros take the limit away.
	limit(root string, id uint32, bytes, inodes int64) error
	// used says what bears an id, and whether anybody has set it a limit. Errors where there are no quotas.
	used(root string, id uint32) (usage, error)
	// bear gives a folder an id, which what is made in it inherits. An id is borne by what is made after, and by nothing before.
	bear(folder string, id uint32) error
	// borne is the id of a folder that hands it on; 0 where it has none.
	borne(folder string) (uint32, error)
	// shares says that files of the file system may have blocks in common, each of which counts for each of them.
	shares(root string) bool
}

// usage is what bears a project id.
type usage struct {
	bytes, inodes int64
	limited       bool
}

// free says that nothing bears the id, and that nobody means something to.
func (u usage) free() bool { return u == usage{} }

// kernelQuotas are the project quotas of ext4 and XFS.
type kernelQuotas struct{}

const (
	projectQuota = 2 // PRJQUOTA

	quotaGet   = 0x800007<<8 | projectQuota   // Q_GETQUOTA, which XFS answers as well
	quotaSet   = 0x800008<<8 | projectQuota   // Q_SETQUOTA
	quotaState = ('X'<<8+8)<<8 | projectQuota // Q_XGETQSTATV, which ext4 answers as well

	// projectEnforced is FS_QUOTA_PDQ_ENFD, of the flags of struct fs_quota_statv, which are at its second byte.
	projectEnforced = 1 << 5

	// getAttributes and setAttributes are FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR.
	getAttributes = 0x801c581f
	setAttributes = 0x401c5820
	// projectInherit is FS_XFLAG_PROJINHERIT: what is made in the folder has its project id, nothing is linked or moved into
	// it from outside, and statfs tells the limit.
	projectInherit = 0x200

	// geometry is XFS_IOC_FSGEOMETRY_V1, of 112 bytes with the flags at 92; reflinks is the one that files may share blocks.
	geometry      = 0x80705864
	geometryFlags = 92
	reflinks      = 1 << 20
)

// attributes is struct fsxattr.
type attributes struct {
	flags, extent, extents, project, cow uint32
	_                                    [8]byte
}

// block is struct if_dqblk. Its limits are in KiB.
type quotaBlock struct {
	hard, soft, space              uint64
	hardInodes, softInodes, inodes uint64
	_, _                           uint64 // times
	valid                          uint32
	_                              uint32
}

// limitsValid is QIF_LIMITS.
const limitsValid = 1 | 4

// quotactl asks the kernel about quotas of the file system that a folder is on.
func quotactl[T any](folder string, cmd, id uint32, arg *T) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer f.Close()
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.Fd(), uintptr(cmd), uintptr(id), uintptr(unsafe.Pointer(arg)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (kernelQuotas) ready(root string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err != nil {
		return fmt.Errorf("file system of %s: %w", root, err)
	}
	state := [256]byte{1} // its version
	err := quotactl(root, quotaState, 0, &state)
	if err == nil && binary.NativeEndian.Uint16(state[2:])&projectEnforced != 0 {
		return nil
	}
	return noQuotas(root, int64(fs.Type), err)
}

// noQuotas says what is missing for folders of a size, and what to do.
func noQuotas(root string, magic int64, err error) error {
	const or = "; or use a class with backing: image"
	switch {
	case magic == unix.EXT4_SUPER_MAGIC:
		return fmt.Errorf("backing: directory needs project quotas, and %s is on ext4 without: unmount it, run "+
			"tune2fs -O quota,project on its device and mount it with the option prjquota, by a kernel that has quotas (module quota_v2)"+or, root)
	case magic == unix.XFS_SUPER_MAGIC:
		return fmt.Errorf("backing: directory needs project quotas, and %s is on XFS without: mount it with the option prjquota "+
			"(rootflags=prjquota on the kernel's command line, where it is the root), by a kernel that has quotas (CONFIG_XFS_QUOTA)"+or, root)
	case err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTTY):
		return fmt.Errorf("backing: directory needs project quotas, and asking for those of %s fails: %w", root, err)
	}
	return fmt.Errorf("backing: directory needs project quotas, and %s is on %s, which has none: put it on ext4 or XFS "+
		"mounted with the option prjquota"+or, root, nameOfFS(magic))
}

// nameOfFS names a file system by its magic number.
func nameOfFS(magic int64) string {
	switch uint32(magic) {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "XFS"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlayfs"
	case unix.NFS_SUPER_MAGIC:
		return "NFS"
	}
	return fmt.Sprintf("a file system of type %#x", uint32(magic))
}

func (kernelQuotas) limit(root string, id uint32, bytes, inodes int64) error {
	b := quotaBlock{hard: uint64(bytes) / 1024, hardInodes: uint64(inodes), valid: limitsValid}
	if err := quotactl(root, quotaSet, id, &b); err != nil {
		return fmt.Errorf("setting the quota of project %d on the file system of %s: %w", id, root, err)
	}
	return nil
}

func (kernelQuotas) used(root string, id uint32) (usage, error) {
	var b quotaBlock
	err := quotactl(root, quotaGet, id, &b)
	if errors.Is(err, unix.ENOENT) { // XFS has never heard of it
		return usage{}, nil
	}
	if err != nil {
		return usage{}, fmt.Errorf("reading the quota of project %d on the file system of %s: %w", id, root, err)
	}
	return usage{bytes: int64(b.space), inodes: int64(b.inodes), limited: b.hard|b.soft|b.hardInodes|b.softInodes != 0}, nil
}

func (kernelQuotas) bear(folder string, id uint32) error {
	f, err := os.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var a attributes
	if err := ioctl(f, getAttributes, &a); err != nil {
		return fmt.Errorf("reading the attributes of %s: %w", folder, err)
	}
	a.project, a.flags = id, a.flags|projectInherit
	if err := ioctl(f, setAttributes, &a); err != nil {
		return fmt.Errorf("giving %s the project id %d: %w", folder, id, err)
	}
	return nil
}

func (kernelQuotas) borne(folder string) (uint32, error) {
	f, err := os.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var a attributes
	if err := ioctl(f, getAttributes, &a); err != nil {
		return 0, fmt.Errorf("reading the attributes of %s: %w", folder, err)
	}
	if a.flags&projectInherit == 0 {
		return 0, nil
	}
	return a.project, nil
}

func (kernelQuotas) shares(root string) bool {
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err == nil && fs.Type == unix.EXT4_SUPER_MAGIC {
		return false
	}
	f, err := os.Open(root)
	if err != nil {
		return true
	}
	defer f.Close()
	var told [112]byte
	if err := ioctl(f, geometry, &told); err != nil {
		return true
	}
	return binary.NativeEndian.Uint32(told[geometryFlags:])&reflinks != 0
}
