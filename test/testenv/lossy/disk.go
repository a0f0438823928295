// Package lossy provides a disk for tests that loses unsynced data in a power cut. It is a file
// system in memory, served by FUSE. It tracks for every file and folder which content is durable
// and which is only in the cache. Crash simulates a power cut and leaves a state that is possible
// on a real disk: without the cache, with all of it, or with torn parts of it. Syncs, reads and
// writes can be made to fail, and the disk can be made full or slow.
//
// The file system is not in the mount table. A Disk holds a detached mount, reached by a symbolic
// link through /proc, so that nothing is left behind however the process ends. A process that maps
// files of the disk must not be the process that serves it. A thread that waits for a page cannot
// be preempted, and Go's garbage collector would wait for the thread forever.
package lossy

import (
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Disk is a lossy disk. Its methods are safe for concurrent use.
type Disk struct {
	link     string
	patience time.Duration // time for users of the disk to close their files
	faults   *faults

	mu      sync.Mutex
	current *volume
	mounted *fuseMount // nil after Close, and if remounting failed
}

const patience = 10 * time.Second

// New creates an empty disk. link is the path of a symbolic link to its root, which must not exist.
// Every Crash changes the link; Close deletes it.
func New(link string) (*Disk, error) {
	d := &Disk{link: link, patience: patience, faults: new(faults)}
	if err := d.mountAtLink(newVolume(d.faults)); err != nil {
		return nil, fmt.Errorf("lossy disk %s: %w", link, err)
	}
	return d, nil
}

// Supported returns nil if lossy disks work on this machine, or the reason why not.
func Supported() error {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("no FUSE: %w", err)
	}
	f.Close()
	m, err := mountVolume(newVolume(new(faults)))
	if err != nil {
		return err
	}
	return m.close(patience)
}

// Path returns the path of the disk's root, which stays the same after a Crash.
func (d *Disk) Path() string { return d.link }

func (d *Disk) currentVolume() *volume {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.current
}

// mountAtLink mounts a volume and changes the link to its mount.
func (d *Disk) mountAtLink(v *volume) error {
	m, err := mountVolume(v)
	if err != nil {
		return err
	}
	next := d.link + ".next"
	err = os.Symlink(m.path(), next)
	if err == nil {
		err = os.Rename(next, d.link)
	}
	if err != nil {
		return errors.Join(err, m.close(d.patience))
	}
	d.mu.Lock()
	d.current, d.mounted = v, m
	d.mu.Unlock()
	return nil
}

// Cut cuts the power: from now on every operation fails with EIO and no data becomes durable. The
// caller must then kill the processes that use the disk. Crash restores the power.
func (d *Disk) Cut() { d.currentVolume().cutPower() }

// PowerLost returns a channel that is closed when the power is cut by Cut or CutAt.
func (d *Disk) PowerLost() <-chan struct{} { return d.currentVolume().dark }

// Unsynced returns the paths of files and folders with unsynced changes.
func (d *Disk) Unsynced() []string { return d.currentVolume().unsyncedPaths() }

// Crash cuts the power, loses unsynced changes as l specifies, and restores the power. The disk is
// at Path again, and the kernel's cache of it is empty. All files on the disk must be closed,
// usually because the processes that use it were killed.
func (d *Disk) Crash(l Loss) error {
	d.mu.Lock()
	v, m := d.current, d.mounted
	d.mu.Unlock()
	v.cutPower()
	if m != nil {
		if err := m.close(d.patience); err != nil {
			return fmt.Errorf("lossy disk %s: %w", d.link, err)
		}
	}
	d.faults.mu.Lock()
	d.faults.cutAt = 0
	d.faults.mu.Unlock()
	if err := d.mountAtLink(v.afterCrash(l)); err != nil {
		return fmt.Errorf("lossy disk %s: %w", d.link, err)
	}
	return nil
}

// Close cuts the power and deletes the disk. It may be called twice.
func (d *Disk) Close() error {
	d.mu.Lock()
	m := d.mounted
	d.mounted = nil
	d.mu.Unlock()
	d.Cut()
	var errs []error
	if m != nil {
		errs = append(errs, m.close(d.patience))
	}
	if err := os.Remove(d.link); err != nil && !os.IsNotExist(err) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lossy disk %s: %w", d.link, err)
	}
	return nil
}

// fuseMount is a detached mount of a volume and its FUSE server.
type fuseMount struct {
	fd     int // the mount; the kernel unmounts when it and all files on the mount are closed
	server *fuse.Server
	once   sync.Once
}

// path returns the path by which processes reach the mount.
func (m *fuseMount) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.fd) }

func mountVolume(v *volume) (*fuseMount, error) {
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/fuse: %w", err)
	}
	fd, err := detachedMount(device)
	if err != nil {
		unix.Close(device)
		return nil, fmt.Errorf("mounting FUSE: %w", err)
	}
	forEver := 24 * time.Hour // the disk changes only through the kernel
	root := fs.NewNodeFS(&node{volume: v, inode: v.root}, &fs.Options{
		EntryTimeout: &forEver, AttrTimeout: &forEver,
		RootStableAttr: &fs.StableAttr{Ino: v.root.id},
	})
	server, err := fuse.NewServer(root, "/dev/fd/"+strconv.Itoa(device), &fuse.MountOptions{
		Name: "lossy", MaxWrite: 1 << 20, DisableXAttrs: true, DisableReadDirPlus: true,
		// Cached and mapped pages stay valid, because every write goes through the kernel.
		ExplicitDataCacheControl: true,
		Logger:                   log.New(io.Discard, "", 0),
	})
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("serving FUSE: %w", err)
	}
	go server.Serve()
	m := &fuseMount{fd: fd, server: server}
	if err := m.refusePolls(); err != nil {
		return nil, errors.Join(fmt.Errorf("serving FUSE: %w", err), m.close(patience))
	}
	return m, nil
}

// detachedMount creates a FUSE mount, served through the device, that is not attached to the mount
// tree.
func detachedMount(device int) (int, error) {
	context, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return 0, err
	}
	defer unix.Close(context)
	for _, o := range [][2]string{
		{"source", "lossy"}, {"fd", strconv.Itoa(device)}, {"rootmode", "40000"},
		{"user_id", strconv.Itoa(os.Geteuid())}, {"group_id", strconv.Itoa(os.Getegid())},
		{"max_read", strconv.Itoa(1 << 20)},
	} {
		if err := unix.FsconfigSetString(context, o[0], o[1]); err != nil {
			return 0, fmt.Errorf("option %s: %w", o[0], err)
		}
	}
	if err := unix.FsconfigCreate(context); err != nil {
		return 0, err
	}
	return unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
}

// refusePolls makes the kernel learn that files do not support poll. Otherwise the kernel asks when
// the Go runtime registers the first file that this process opens. At that moment no thread may be
// left to respond.
func (m *fuseMount) refusePolls() error {
	const served = ".go-fuse-epoll-hack" // a file that the FUSE library provides for this purpose
	fd, err := unix.Openat(m.fd, served, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return errors.Join(err, unix.Close(fd))
}

// close closes the mount and waits until the kernel has unmounted it.
func (m *fuseMount) close(patience time.Duration) error {
	m.once.Do(func() { unix.Close(m.fd) })
	over := make(chan struct{})
	go func() {
		m.server.Wait()
		close(over)
	}()
	select {
	case <-over:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("files on the disk are still open after %s", patience)
	}
}
