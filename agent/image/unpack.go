package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Names with which a layer says that something of the layers below is gone.
const (
	whiteout       = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
	overlayOpaque  = "trusted.overlay.opaque"
)

// errUnsafe says that an archive tries to reach out of its folder.
var errUnsafe = errors.New("path leads out of the image")

// unpacker writes one layer into a folder, as a lower folder of an overlay. Links
// in the archive are resolved as the container will see them, never as the host
// does, and every access goes through os.Root besides.
type unpacker struct {
	dir  string
	root *os.Root

	meter   meter
	inodes  int64
	implied []string        // folders that the layer uses and does not list
	listed  map[string]bool // folders that it lists
	links   []hardLink      // to files of layers below
	times   []folderTime
}

type hardLink struct{ name, target string }

type folderTime struct {
	name string
	time time.Time
}

func newUnpacker(dir string, limits Limits) (*unpacker, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &unpacker{dir: dir, root: root, listed: map[string]bool{}, meter: meter{limits: limits, dir: dir}}, nil
}

func (u *unpacker) close() { u.root.Close() }

// unpack reads the archive to its end.
func (u *unpacker) unpack(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		if err := u.entry(h, t); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	if err := u.meter.entry(h.Name, h.Linkname); err != nil {
		return err
	}
	name, err := u.place(h.Name)
	if err != nil {
		return err
	}
	base := path.Base(name)
	switch {
	case name == ".":
		if h.Typeflag != tar.TypeDir {
			return fmt.Errorf("the root is not a folder")
		}
		return u.attributes(".", h)
	case base == opaqueWhiteout:
		return u.opaque(path.Dir(name))
	case strings.HasPrefix(base, ".wh..wh."):
		return nil // other marks of old union file systems mean nothing here
	case strings.HasPrefix(base, whiteout):
		return u.gone(path.Join(path.Dir(name), strings.TrimPrefix(base, whiteout)))
	}
	if err := u.clear(name, h.Typeflag == tar.TypeDir); err != nil {
		return err
	}
	u.inodes++
	switch h.Typeflag {
	case tar.TypeDir:
		err = u.folder(name)
	case tar.TypeReg, '\x00':
		err = u.file(name, h, content)
	case tar.TypeSymlink:
		err = u.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return u.link(name, h)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		err = u.node(name, h)
	case tar.TypeXGlobalHeader:
		u.inodes--
		return nil
	default:
		return fmt.Errorf("type %q is not known", h.Typeflag)
	}
	if err != nil {
		return err
	}
	return u.attributes(name, h)
}

// place finds where an entry goes: its folder with all links resolved below the
// root and made where missing, and its last element as it is.
func (u *unpacker) place(name string) (string, error) {
	clean := path.Clean("/" + name)[1:]
	for _, e := range strings.Split(name, "/") {
		if e == ".." {
			return "", errUnsafe
		}
	}
	if clean == "" {
		return ".", nil
	}
	dir, err := u.resolve(path.Dir(clean))
	if err != nil {
		return "", err
	}
	if err := u.makeFolders(dir); err != nil {
		return "", err
	}
	return path.Join(dir, path.Base(clean)), nil
}

// resolve follows links below the root; an absolute one starts at the root, ".."
// stops there. What does not exist resolves to itself.
func (u *unpacker) resolve(dir string) (string, error) {
	const maxLinks = 64
	todo := strings.Split(dir, "/")
	done := "."
	for links := 0; len(todo) > 0; {
		e := todo[0]
		todo = todo[1:]
		switch e {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done) // Dir(".") is "."
			continue
		}
		next := path.Join(done, e)
		st, err := u.root.Lstat(next)
		if errors.Is(err, os.ErrNotExist) {
			done = next
			continue
		}
		if err != nil {
			return "", err
		}
		if st.Mode()&os.ModeSymlink == 0 {
			done = next
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("%s: too many links", next)
		}
		target, err := u.root.Readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(target) {
			done = "."
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return done, nil
}

// makeFolders makes the folders of a resolved path that the archive has not listed.
func (u *unpacker) makeFolders(dir string) error {
	if dir == "." {
		return nil
	}
	if st, err := u.root.Lstat(dir); err == nil {
		if st.IsDir() {
			return nil
		}
		// A file became a folder within the layer.
		if err := u.root.Remove(dir); err != nil {
			return err
		}
	}
	if err := u.makeFolders(path.Dir(dir)); err != nil {
		return err
	}
	if err := u.meter.remember(dir); err != nil {
		return err
	}
	u.implied = append(u.implied, dir)
	u.inodes++
	if err := u.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return u.root.Chmod(dir, 0o755)
}

// clear makes room: later entries replace earlier ones, but a folder stays a folder.
func (u *unpacker) clear(name string, folder bool) error {
	st, err := u.root.Lstat(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil || (folder && st.IsDir()) {
		return err
	}
	return u.root.RemoveAll(name)
}

func (u *unpacker) folder(name string) error {
	if err := u.meter.remember(name); err != nil {
		return err
	}
	u.listed[name] = true
	if err := u.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (u *unpacker) file(name string, h *tar.Header, content io.Reader) error {
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = u.meter.copy(f, content, h.Size)
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

// link makes a hard link. One to a file of a layer below waits until those are there.
func (u *unpacker) link(name string, h *tar.Header) error {
	for _, e := range strings.Split(h.Linkname, "/") {
		if e == ".." {
			return fmt.Errorf("link to %q: %w", h.Linkname, errUnsafe)
		}
	}
	clean := path.Clean("/" + h.Linkname)[1:]
	if clean == "" {
		return errors.New("link to the root")
	}
	dir, err := u.resolve(path.Dir(clean))
	if err != nil {
		return err
	}
	target := path.Join(dir, path.Base(clean))
	err = u.root.Link(target, name)
	if errors.Is(err, os.ErrNotExist) {
		u.links = append(u.links, hardLink{name, target})
		return u.meter.remember(name + target)
	}
	return err
}

// inFolder calls f with the path of name by way of its open folder, for system
// calls that os.Root does not have. The last element is not followed by lchown and
// the like.
func (u *unpacker) inFolder(name string, f func(path string) error) error {
	d, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer d.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), path.Base(name)))
}

func (u *unpacker) node(name string, h *tar.Header) error {
	mode := uint32(h.Mode & 0o7777)
	switch h.Typeflag {
	case tar.TypeChar:
		mode |= unix.S_IFCHR
	case tar.TypeBlock:
		mode |= unix.S_IFBLK
	default:
		mode |= unix.S_IFIFO
	}
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return errors.New("device 0/0 would hide a file")
	}
	return u.inFolder(name, func(p string) error {
		return unix.Mknod(p, mode, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
	})
}

// gone hides a name of the layers below, unless this layer has one itself.
func (u *unpacker) gone(name string) error {
	if _, err := u.root.Lstat(name); err == nil {
		return nil
	}
	if path.Base(name) == "." || path.Base(name) == ".." {
		return errUnsafe
	}
	u.inodes++
	return u.inFolder(name, func(p string) error { return unix.Mknod(p, unix.S_IFCHR, 0) })
}

// opaque hides everything of a folder in the layers below.
func (u *unpacker) opaque(dir string) error {
	d, err := u.root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Fsetxattr(int(d.Fd()), overlayOpaque, []byte("y"), 0)
}

// attributes sets owner, mode, extended attributes and time, in the order in which
// they do not undo each other.
func (u *unpacker) attributes(name string, h *tar.Header) error {
	if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
		return err
	}
	const xattr = "SCHILY.xattr."
	for k, v := range h.PAXRecords {
		key, ok := strings.CutPrefix(k, xattr)
		if !ok || strings.HasPrefix(key, "trusted.overlay.") || strings.HasPrefix(key, "user.overlay.") {
			continue
		}
		err := u.inFolder(name, func(p string) error { return unix.Lsetxattr(p, key, []byte(v), 0) })
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("attribute %s: %w", key, err)
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		ts := []unix.Timespec{unix.NsecToTimespec(h.ModTime.UnixNano()), unix.NsecToTimespec(h.ModTime.UnixNano())}
		return u.inFolder(name, func(p string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, unix.AT_SYMLINK_NOFOLLOW) })
	}
	if err := u.root.Chmod(name, fileMode(h.Mode)); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		u.times = append(u.times, folderTime{name, h.ModTime}) // when nothing is put into it any more
		return nil
	}
	return u.root.Chtimes(name, h.ModTime, h.ModTime)
}

// fileMode translates the bits of an archive.
func fileMode(bits int64) os.FileMode {
	m := os.FileMode(bits & 0o777)
	for _, b := range []struct {
		bit  int64
		mode os.FileMode
	}{{0o4000, os.ModeSetuid}, {0o2000, os.ModeSetgid}, {0o1000, os.ModeSticky}} {
		if bits&b.bit != 0 {
			m |= b.mode
		}
	}
	return m
}

// finish does what depends on the layers below, topmost first.
func (u *unpacker) finish(below []string) error {
	for _, dir := range u.implied {
		if u.listed[dir] {
			continue
		}
		if err := u.inherit(dir, below); err != nil {
			return fmt.Errorf("folder %q: %w", dir, err)
		}
	}
	for _, l := range u.links {
		if err := u.linkBelow(l, below); err != nil {
			return fmt.Errorf("entry %q: %w", l.name, err)
		}
	}
	for i := len(u.times) - 1; i >= 0; i-- {
		if err := u.root.Chtimes(u.times[i].name, u.times[i].time, u.times[i].time); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// inherit gives a folder that the layer did not list the owner and mode it has below.
func (u *unpacker) inherit(dir string, below []string) error {
	for _, lower := range below {
		root, err := os.OpenRoot(lower)
		if err != nil {
			return err
		}
		st, err := root.Lstat(dir)
		root.Close()
		if err != nil || !st.IsDir() {
			continue
		}
		var sys unix.Stat_t
		if err := unix.Lstat(filepath.Join(lower, dir), &sys); err != nil {
			return err
		}
		if err := u.root.Lchown(dir, int(sys.Uid), int(sys.Gid)); err != nil {
			return err
		}
		return u.root.Chmod(dir, st.Mode())
	}
	return nil
}

// linkBelow copies the file that a link means, as an overlay would on writing.
func (u *unpacker) linkBelow(l hardLink, below []string) error {
	for _, lower := range below {
		root, err := os.OpenRoot(lower)
		if err != nil {
			return err
		}
		err = u.copyFrom(root, l)
		root.Close()
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return fmt.Errorf("link to %q, which is not there", l.target)
}

func (u *unpacker) copyFrom(root *os.Root, l hardLink) error {
	st, err := root.Lstat(l.target)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("link to %q, which is no file", l.target)
	}
	src, err := root.Open(l.target)
	if err != nil {
		return err
	}
	defer src.Close()
	var sys unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &sys); err != nil {
		return err
	}
	file := &tar.Header{Typeflag: tar.TypeReg, Size: st.Size(), Mode: int64(sys.Mode & 0o7777), Uid: int(sys.Uid), Gid: int(sys.Gid), ModTime: st.ModTime()}
	if err := u.file(l.name, file, src); err != nil {
		return err
	}
	return u.attributes(l.name, file)
}
