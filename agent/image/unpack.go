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

// Names of the entries (whiteouts) by which a layer hides content of the layers below.
const (
	whiteout       = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
	overlayOpaque  = "trusted.overlay.opaque"
)

// errUnsafe is returned for an archive with a path that leads outside the image.
var errUnsafe = errors.New("path leads outside the image")

// unpacker writes one layer into a folder, which becomes a lower folder of overlays. Links in the
// archive are resolved relative to that folder, as in the container, and never on the host. In
// addition, every access goes through os.Root.
type unpacker struct {
	dir  string
	root *os.Root

	meter   archiveMeter
	inodes  int64
	implied []string        // folders that the layer uses but does not list
	listed  map[string]bool // folders that it lists
	links   []hardLink      // links to files of lower layers
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
	return &unpacker{dir: dir, root: root, listed: map[string]bool{}, meter: archiveMeter{limits: limits, dir: dir}}, nil
}

func (u *unpacker) closeRoot() { u.root.Close() }

// unpackArchive unpacks the tar archive r to its end into the folder of the layer.
func (u *unpacker) unpackArchive(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		if err := u.unpackEntry(h, t); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
}

func (u *unpacker) unpackEntry(h *tar.Header, content io.Reader) error {
	if err := u.meter.countEntry(h.Name, h.Linkname); err != nil {
		return err
	}
	name, err := u.resolveEntry(h.Name)
	if err != nil {
		return err
	}
	base := path.Base(name)
	switch {
	case name == ".":
		if h.Typeflag != tar.TypeDir {
			return fmt.Errorf("the root is not a folder")
		}
		return u.setAttributes(".", h)
	case base == opaqueWhiteout:
		return u.markOpaque(path.Dir(name))
	case strings.HasPrefix(base, ".wh..wh."):
		return nil // other markers of old union file systems have no meaning here
	case strings.HasPrefix(base, whiteout):
		return u.makeWhiteout(path.Join(path.Dir(name), strings.TrimPrefix(base, whiteout)))
	}
	if err := u.removeExisting(name, h.Typeflag == tar.TypeDir); err != nil {
		return err
	}
	u.inodes++
	switch h.Typeflag {
	case tar.TypeDir:
		err = u.makeFolder(name)
	case tar.TypeReg, '\x00':
		err = u.writeFile(name, h, content)
	case tar.TypeSymlink:
		err = u.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return u.makeHardLink(name, h)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		err = u.makeNode(name, h)
	case tar.TypeXGlobalHeader:
		u.inodes--
		return nil
	default:
		return fmt.Errorf("unknown type %q", h.Typeflag)
	}
	if err != nil {
		return err
	}
	return u.setAttributes(name, h)
}

// resolveEntry returns the path of the archive entry name below the layer's root. The folders in
// its path are created if they are missing, and links in it are resolved below the root. The last
// element is not resolved.
func (u *unpacker) resolveEntry(name string) (string, error) {
	clean := path.Clean("/" + name)[1:]
	for _, e := range strings.Split(name, "/") {
		if e == ".." {
			return "", errUnsafe
		}
	}
	if clean == "" {
		return ".", nil
	}
	dir, err := u.resolveLinks(path.Dir(clean))
	if err != nil {
		return "", err
	}
	if err := u.makeFolders(dir); err != nil {
		return "", err
	}
	return path.Join(dir, path.Base(clean)), nil
}

// resolveLinks resolves the links in the path dir below the layer's root. An absolute link starts
// at the root, and ".." does not leave it. A path that does not exist is returned unchanged.
func (u *unpacker) resolveLinks(dir string) (string, error) {
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

// makeFolders creates the missing folders in a path that resolveLinks has resolved.
func (u *unpacker) makeFolders(dir string) error {
	if dir == "." {
		return nil
	}
	if st, err := u.root.Lstat(dir); err == nil {
		if st.IsDir() {
			return nil
		}
		// Within the layer, a folder replaces a file.
		if err := u.root.Remove(dir); err != nil {
			return err
		}
	}
	if err := u.makeFolders(path.Dir(dir)); err != nil {
		return err
	}
	if err := u.meter.countName(dir); err != nil {
		return err
	}
	u.implied = append(u.implied, dir)
	u.inodes++
	if err := u.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return u.root.Chmod(dir, 0o755)
}

// removeExisting removes the existing file of an entry, because later entries of an archive replace
// earlier ones. With folder, an existing folder is kept.
func (u *unpacker) removeExisting(name string, folder bool) error {
	st, err := u.root.Lstat(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil || (folder && st.IsDir()) {
		return err
	}
	return u.root.RemoveAll(name)
}

func (u *unpacker) makeFolder(name string) error {
	if err := u.meter.countName(name); err != nil {
		return err
	}
	u.listed[name] = true
	if err := u.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (u *unpacker) writeFile(name string, h *tar.Header, content io.Reader) error {
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = u.meter.copyContent(f, content, h.Size)
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

// makeHardLink creates a hard link as described by the archive entry h. A link to a file of a lower
// layer is deferred to finishLayer.
func (u *unpacker) makeHardLink(name string, h *tar.Header) error {
	for _, e := range strings.Split(h.Linkname, "/") {
		if e == ".." {
			return fmt.Errorf("link to %q: %w", h.Linkname, errUnsafe)
		}
	}
	clean := path.Clean("/" + h.Linkname)[1:]
	if clean == "" {
		return errors.New("link to the root")
	}
	dir, err := u.resolveLinks(path.Dir(clean))
	if err != nil {
		return err
	}
	target := path.Join(dir, path.Base(clean))
	err = u.root.Link(target, name)
	if errors.Is(err, os.ErrNotExist) {
		u.links = append(u.links, hardLink{name, target})
		return u.meter.countName(name + target)
	}
	return err
}

// inFolder calls f with a path of the entry name that goes through its open parent folder. It is
// for system calls that os.Root does not support. If the system call does not follow links, neither
// does the last element of the path.
func (u *unpacker) inFolder(name string, f func(path string) error) error {
	d, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer d.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), path.Base(name)))
}

func (u *unpacker) makeNode(name string, h *tar.Header) error {
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

// makeWhiteout makes the layer hide the entry name of the lower layers, unless this layer has an
// entry with that name.
func (u *unpacker) makeWhiteout(name string) error {
	if _, err := u.root.Lstat(name); err == nil {
		return nil
	}
	if path.Base(name) == "." || path.Base(name) == ".." {
		return errUnsafe
	}
	u.inodes++
	return u.inFolder(name, func(p string) error { return unix.Mknod(p, unix.S_IFCHR, 0) })
}

// markOpaque makes the layer hide the content that the folder dir has in the lower layers.
func (u *unpacker) markOpaque(dir string) error {
	d, err := u.root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Fsetxattr(int(d.Fd()), overlayOpaque, []byte("y"), 0)
}

// setAttributes sets owner, extended attributes, mode and time of an entry as in the archive header
// h. It sets them in an order in which none resets another.
func (u *unpacker) setAttributes(name string, h *tar.Header) error {
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
		u.times = append(u.times, folderTime{name, h.ModTime}) // set after all entries are in the folder
		return nil
	}
	return u.root.Chtimes(name, h.ModTime, h.ModTime)
}

// fileMode converts the mode bits of a tar header to an os.FileMode.
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

// finishLayer completes the parts of the layer that depend on the lower layers. These are
// attributes of folders that the layer does not list, links to files of lower layers, and times of
// folders. below are the folders of the lower layers, topmost first.
func (u *unpacker) finishLayer(below []string) error {
	for _, dir := range u.implied {
		if u.listed[dir] {
			continue
		}
		if err := u.inheritAttributes(dir, below); err != nil {
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

// inheritAttributes gives the folder dir, which the layer did not list, the owner and mode that it
// has in the lower layers.
func (u *unpacker) inheritAttributes(dir string, below []string) error {
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

// linkBelow copies the target of a hard link from a lower layer into this layer, as an overlay does
// on writing.
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
	return fmt.Errorf("link to %q, which does not exist", l.target)
}

func (u *unpacker) copyFrom(root *os.Root, l hardLink) error {
	st, err := root.Lstat(l.target)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("link to %q, which is not a regular file", l.target)
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
	if err := u.writeFile(l.name, file, src); err != nil {
		return err
	}
	return u.setAttributes(l.name, file)
}
