package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// quotaBackend sets and reads project quotas. A folder has a project ID. The quota limits the total
// size of all files with this ID on their file system. The type kernelQuotas implements
// quotaBackend; tests use an implementation in memory.
type quotaBackend interface {
	// checkReady returns nil if the file system of the folder root enforces project quotas.
	// Otherwise the error contains the reason and the remedy.
	checkReady(root string) error
	// setLimit sets the limits of a project ID in bytes and inodes on the file system of root. 0
	// removes a limit.
	setLimit(root string, id uint32, bytes, inodes int64) error
	// usageOf returns the usage of a project ID on the file system of root, and whether the ID has
	// a limit. It returns an error if the file system has no quotas.
	usageOf(root string, id uint32) (projectUsage, error)
	// setProject sets the project ID of a folder. Files that are later created in the folder get
	// the same ID; existing files do not change.
	setProject(folder string, id uint32) error
	// projectIDOf returns the project ID that new files in a folder get, or 0 if they get no ID.
	projectIDOf(folder string) (uint32, error)
	// mayShareBlocks reports whether files on the file system of root may share blocks (reflinks).
	// Such blocks count for each of the files.
	mayShareBlocks(root string) bool
}

// projectUsage is the usage of a project ID in bytes and inodes, and whether the ID has a limit.
type projectUsage struct {
	bytes, inodes int64
	limited       bool
}

// isUnused reports whether the project ID has neither files nor a limit.
func (u projectUsage) isUnused() bool { return u == projectUsage{} }

// kernelQuotas implements quotaBackend by system calls, for the project quotas of ext4 and XFS.
type kernelQuotas struct{}

const (
	projectQuota = 2 // PRJQUOTA

	quotaGet   = 0x800007<<8 | projectQuota   // Q_GETQUOTA, also supported by XFS
	quotaSet   = 0x800008<<8 | projectQuota   // Q_SETQUOTA
	quotaState = ('X'<<8+8)<<8 | projectQuota // Q_XGETQSTATV, also supported by ext4

	// projectEnforced is FS_QUOTA_PDQ_ENFD, the flag for enforced project quotas in struct
	// fs_quota_statv. The flags of the struct start at byte 2.
	projectEnforced = 1 << 5

	// ioctlGetXattr and ioctlSetXattr are the requests FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR,
	// which read and write a struct fsxattr with the project ID of a file.
	ioctlGetXattr = 0x801c581f
	ioctlSetXattr = 0x401c5820
	// projectInherit is FS_XFLAG_PROJINHERIT, a flag of a folder. New files in the folder get its
	// project ID, and files with another ID cannot be linked or moved into it. For such a folder,
	// statfs reports the quota limit.
	projectInherit = 0x200

	// ioctlGeometry is the request XFS_IOC_FSGEOMETRY_V1, which fills a struct of 112 bytes.
	// geometryReflink is a flag in it: files may share blocks.
	ioctlGeometry       = 0x80705864
	geometryFlagsOffset = 92
	geometryReflink     = 1 << 20
)

// fsxattr is struct fsxattr of the kernel: attributes of a file, including its project ID.
type fsxattr struct {
	flags, extent, extents, project, cow uint32
	_                                    [8]byte
}

// quotaBlock is struct if_dqblk of the kernel: limits and usage of a project ID. Limits of space
// are in KiB, and usage is in bytes.
type quotaBlock struct {
	hard, soft, space              uint64
	hardInodes, softInodes, inodes uint64
	_, _                           uint64 // times
	valid                          uint32
	_                              uint32
}

// quotaLimitsValid is QIF_LIMITS of the kernel: quotaBlock contains valid limits of space and
// inodes.
const quotaLimitsValid = 1 | 4

// quotactl calls quotactl_fd with the command cmd for the file system of a folder. id is a project
// ID. The kernel reads or writes arg.
func quotactl[T any](folder string, cmd, id uint32, arg *T) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer f.Close()
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.Fd(), uintptr(cmd), uintptr(id),
		uintptr(unsafe.Pointer(arg)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (kernelQuotas) checkReady(root string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err != nil {
		return fmt.Errorf("file system of %s: %w", root, err)
	}
	state := [256]byte{1} // version of the struct
	err := quotactl(root, quotaState, 0, &state)
	if err == nil && binary.NativeEndian.Uint16(state[2:])&projectEnforced != 0 {
		return nil
	}
	return quotaProblem(root, int64(fs.Type), err)
}

// quotaProblem returns an error with the reason why the file system of root has no project quotas,
// and the remedy. magic is the file system type as statfs reports it, and err is the result of the
// query for quotas.
func quotaProblem(root string, magic int64, err error) error {
	const or = "; or use a class with backing: image"
	switch {
	case magic == unix.EXT4_SUPER_MAGIC:
		return fmt.Errorf("backing: directory needs project quotas, and %s is on ext4 without: unmount it, run "+
			"tune2fs -O quota,project on its device and mount it with the option prjquota, by a kernel that has "+
			"quotas (module quota_v2)"+or, root)
	case magic == unix.XFS_SUPER_MAGIC:
		return fmt.Errorf("backing: directory needs project quotas, and %s is on XFS without: mount it with the "+
			"option prjquota "+
			"(rootflags=prjquota on the kernel's command line, where it is the root), by a kernel that has quotas "+
			"(CONFIG_XFS_QUOTA)"+or, root)
	case err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTTY):
		return fmt.Errorf("backing: directory needs project quotas, and reading those of %s failed: %w", root, err)
	}
	return fmt.Errorf("backing: directory needs project quotas, and %s is on %s, which has none: put "+
		"it on ext4 or XFS "+
		"mounted with the option prjquota"+or, root, fileSystemName(magic))
}

// fileSystemName returns the name of the file system type with this magic number, as statfs reports
// it.
func fileSystemName(magic int64) string {
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

func (kernelQuotas) setLimit(root string, id uint32, bytes, inodes int64) error {
	b := quotaBlock{hard: uint64(bytes) / 1024, hardInodes: uint64(inodes), valid: quotaLimitsValid}
	if err := quotactl(root, quotaSet, id, &b); err != nil {
		return fmt.Errorf("setting the quota of project %d on the file system of %s: %w", id, root, err)
	}
	return nil
}

func (kernelQuotas) usageOf(root string, id uint32) (projectUsage, error) {
	var b quotaBlock
	err := quotactl(root, quotaGet, id, &b)
	if errors.Is(err, unix.ENOENT) { // XFS has no quota of this project ID
		return projectUsage{}, nil
	}
	if err != nil {
		return projectUsage{}, fmt.Errorf("reading the quota of project %d on the file system of %s: %w", id, root, err)
	}
	return projectUsage{bytes: int64(b.space), inodes: int64(b.inodes),
		limited: b.hard|b.soft|b.hardInodes|b.softInodes != 0}, nil
}

func (kernelQuotas) setProject(folder string, id uint32) error {
	f, err := os.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var a fsxattr
	if err := ioctlPointer(f, ioctlGetXattr, &a); err != nil {
		return fmt.Errorf("reading the attributes of %s: %w", folder, err)
	}
	a.project, a.flags = id, a.flags|projectInherit
	if err := ioctlPointer(f, ioctlSetXattr, &a); err != nil {
		return fmt.Errorf("giving %s the project id %d: %w", folder, id, err)
	}
	return nil
}

func (kernelQuotas) projectIDOf(folder string) (uint32, error) {
	f, err := os.OpenFile(folder, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var a fsxattr
	if err := ioctlPointer(f, ioctlGetXattr, &a); err != nil {
		return 0, fmt.Errorf("reading the attributes of %s: %w", folder, err)
	}
	if a.flags&projectInherit == 0 {
		return 0, nil
	}
	return a.project, nil
}

func (kernelQuotas) mayShareBlocks(root string) bool {
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
	if err := ioctlPointer(f, ioctlGeometry, &told); err != nil {
		return true
	}
	return binary.NativeEndian.Uint32(told[geometryFlagsOffset:])&geometryReflink != 0
}
