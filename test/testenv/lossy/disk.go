// Package lossy is a disk for tests that forgets in a power cut what was not
// synced: a file system in memory, served by FUSE, that knows of every file
// and folder what is on the platter and what is only in the cache before it.
// Crash takes the power away and gives back what a real disk might have: nothing
// of the cache, all of it, or torn pieces. Syncs, reads and writes can be made
// to fail, and the disk to be full or slow.
//
// The file system is mounted nowhere: a Disk holds a detached mount, reached
// by a symbolic link through /proc, so that nothing stays behind however the
// process ends. Processes that use the disk must be others than the one that
// serves it when they map files: a thread that waits for a page cannot be
// stopped, and Go's collector would wait for it for ever.
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

// Disk is a lossy disk. Its methods may be called from any goroutine.
type Disk struct {
	link     string
	patience time.Duration // that the users of the disk have to close their files
	faults   *faults

	mu      sync.Mutex
	current *volume
	mounted *mount // nil after Close, and when mounting again failed
}

const patience = 10 * time.Second

// New makes an empty disk that is found at the path link, which must not exist:
// a symbolic link that changes with every Crash. Close takes it away.
func New(link string) (*Disk, error) {
	d := &Disk{link: link, patience: patience, faults: new(faults)}
	if err := d.attach(newVolume(d.faults)); err != nil {
		return nil, fmt.Errorf("lossy disk %s: %w", link, err)
	}
	return d, nil
}

// Supported says why lossy disks cannot be had here; nil when they can.
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

// Path is where the disk's root is found, before and after a Crash.
func (d *Disk) Path() string { return d.link }

func (d *Disk) volume() *volume {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.current
}

// attach mounts a volume and points the link to it.
func (d *Disk) attach(v *volume) error {
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

// Cut takes the power away: from now on everything asked of the disk fails
// with EIO and nothing gets to the platter. Then the processes that use the
// disk are to be killed, and Crash gives the power back.
func (d *Disk) Cut() { d.volume().cut() }

// Dark is closed once the power is cut, by Cut or as CutAt has planned.
func (d *Disk) Dark() <-chan struct{} { return d.volume().dark }

// Unsynced are the files and folders of which a power cut now could take something.
func (d *Disk) Unsynced() []string { return d.volume().unsynced() }

// Crash cuts the power, loses what the loss says, and gives the power back: the
// disk is found again at Path, with nothing of it in the kernel's memory. All
// files on it must have been closed, as they are when their processes are dead.
func (d *Disk) Crash(l Loss) error {
	d.mu.Lock()
	v, m := d.current, d.mounted
	d.mu.Unlock()
	v.cut()
	if m != nil {
		if err := m.close(d.patience); err != nil {
			return fmt.Errorf("lossy disk %s: %w", d.link, err)
		}
	}
	d.faults.mu.Lock()
	d.faults.cutAt = 0
	d.faults.mu.Unlock()
	if err := d.attach(v.after(l)); err != nil {
		return fmt.Errorf("lossy disk %s: %w", d.link, err)
	}
	return nil
}

// Close takes the disk away. It may be called twice.
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

// mount is a detached mount of a volume and its server.
type mount struct {
	fd     int // of the mount: when it and all files on it are closed, the kernel takes the mount apart
	server *fuse.Server
	once   sync.Once
}

// path is how processes reach the mount.
func (m *mount) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.fd) }

func mountVolume(v *volume) (*mount, error) {
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/fuse: %w", err)
	}
	fd, err := detached(device)
	if err != nil {
		unix.Close(device)
		return nil, fmt.Errorf("mounting FUSE: %w", err)
	}
	forEver := 24 * time.Hour // nobody changes the disk behind the kernel's back
	root := fs.NewNodeFS(&node{volume: v, inode: v.root}, &fs.Options{
		EntryTimeout: &forEver, AttrTimeout: &forEver,
		RootStableAttr: &fs.StableAttr{Ino: v.root.id},
	})
	server, err := fuse.NewServer(root, "/dev/fd/"+strconv.Itoa(device), &fuse.MountOptions{
		Name: "lossy", MaxWrite: 1 << 20, DisableXAttrs: true, DisableReadDirPlus: true,
		// The kernel's pages, mapped ones too, stay valid: it has seen every write.
		ExplicitDataCacheControl: true,
		Logger:                   log.New(io.Discard, "", 0),
	})
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("serving FUSE: %w", err)
	}
	go server.Serve()
	m := &mount{fd: fd, server: server}
	if err := m.refusePolls(); err != nil {
		return nil, errors.Join(fmt.Errorf("serving FUSE: %w", err), m.close(patience))
	}
	return m, nil
}

// detached makes a mount that is in no tree, served through the device.
func detached(device int) (int, error) {
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

// refusePolls makes the kernel ask once whether files can be polled. Else it
// asks when the Go runtime registers the first file opened by this very
// process, which may be at a moment when no thread is left to answer.
func (m *mount) refusePolls() error {
	const served = ".go-fuse-epoll-hack" // a file that the FUSE library has for this
	fd, err := unix.Openat(m.fd, served, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return errors.Join(err, unix.Close(fd))
}

// close lets go of the mount and waits until the kernel has taken it apart.
func (m *mount) close(patience time.Duration) error {
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
