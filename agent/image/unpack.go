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

// unpacker writes one layer into a folder, which becomes a lower folder of overlays. It resolves
// links in the archive relative to that folder, as in the container, and never on the host. In
// addition, every access goes through os.Root.
type unpacker struct {
	dir  string
	root *os.Root

	meter   archiveMeter
	inodes  int64
	implied []string        // folders in the paths of entries that the archive does not list
	listed  map[string]bool // folders that the archive lists
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
	return &unpacker{dir: dir, root: root, listed: map[string]bool{}, meter: archiveMeter{limits: limits, dir: dir}},
		nil
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

// resolveEntry returns the path of an archive entry relative to the layer's root. It creates
// missing folders in the path and resolves links in it below the root. It does not resolve the last
// element.
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

// resolveLinks returns the path dir with its links resolved below the layer's root. An absolute
// link starts at the root, and ".." does not leave it. A part that does not exist is kept.
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

// makeFolders creates the missing folders of dir, a path that resolveLinks has returned.
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

// removeExisting removes the file or folder at the path of a new entry, because later entries of an
// archive replace earlier entries. If folder is true, the new entry is a folder and an existing
// folder is kept.
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

// makeHardLink creates the hard link that the archive entry h describes. finishLayer creates it
// instead if its target is in a lower layer.
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

// inFolder invokes call with a path of an entry that goes through the entry's open parent folder.
// It is for system calls that os.Root does not support. A link in the last element of the path is
// followed only if the system call follows links.
func (u *unpacker) inFolder(entry string, call func(folder string) error) error {
	d, err := u.root.Open(path.Dir(entry))
	if err != nil {
		return err
	}
	defer d.Close()
	return call(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), path.Base(entry)))
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

// makeWhiteout adds an overlay whiteout, which hides an entry of the lower layers, unless this
// layer has an entry at the same path.
func (u *unpacker) makeWhiteout(entry string) error {
	if _, err := u.root.Lstat(entry); err == nil {
		return nil
	}
	if path.Base(entry) == "." || path.Base(entry) == ".." {
		return errUnsafe
	}
	u.inodes++
	return u.inFolder(entry, func(p string) error { return unix.Mknod(p, unix.S_IFCHR, 0) })
}

// markOpaque marks the folder dir as opaque, which hides the content that it has in the lower
// layers.
func (u *unpacker) markOpaque(dir string) error {
	d, err := u.root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Fsetxattr(int(d.Fd()), overlayOpaque, []byte("y"), 0)
}

// setAttributes sets the owner, extended attributes, mode and time of an entry from its tar header.
// The order matters: for example, a change of the owner resets mode bits. The times of folders are
// set by finishLayer.
func (u *unpacker) setAttributes(entry string, header *tar.Header) error {
	if err := u.root.Lchown(entry, header.Uid, header.Gid); err != nil {
		return err
	}
	const xattr = "SCHILY.xattr."
	for k, v := range header.PAXRecords {
		key, ok := strings.CutPrefix(k, xattr)
		if !ok || strings.HasPrefix(key, "trusted.overlay.") || strings.HasPrefix(key, "user.overlay.") {
			continue
		}
		err := u.inFolder(entry, func(p string) error { return unix.Lsetxattr(p, key, []byte(v), 0) })
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("attribute %s: %w", key, err)
		}
	}
	if header.Typeflag == tar.TypeSymlink {
		modTime := unix.NsecToTimespec(header.ModTime.UnixNano())
		ts := []unix.Timespec{modTime, modTime}
		return u.inFolder(entry, func(p string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, unix.AT_SYMLINK_NOFOLLOW)
		})
	}
	if err := u.root.Chmod(entry, fileMode(header.Mode)); err != nil {
		return err
	}
	if header.Typeflag == tar.TypeDir {
		u.times = append(u.times, folderTime{entry, header.ModTime}) // set after all entries are in the folder
		return nil
	}
	return u.root.Chtimes(entry, header.ModTime, header.ModTime)
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

// finishLayer completes the layer after all entries are unpacked. lowerLayers are the folders of
// the lower layers, topmost first. finishLayer copies the owner and mode of folders that the
// archive does not list from the lower layers. It creates the hard links to files of lower layers,
// and sets the times of folders.
func (u *unpacker) finishLayer(lowerLayers []string) error {
	for _, dir := range u.implied {
		if u.listed[dir] {
			continue
		}
		if err := u.inheritAttributes(dir, lowerLayers); err != nil {
			return fmt.Errorf("folder %q: %w", dir, err)
		}
	}
	for _, l := range u.links {
		if err := u.linkBelow(l, lowerLayers); err != nil {
			return fmt.Errorf("entry %q: %w", l.name, err)
		}
	}
	for i := len(u.times) - 1; i >= 0; i-- {
		if err := u.root.Chtimes(u.times[i].name, u.times[i].time, u.times[i].time); err != nil &&
			!errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// inheritAttributes gives the folder dir, which the archive does not list, the owner and mode that
// it has in the topmost lower layer that contains it.
func (u *unpacker) inheritAttributes(dir string, lowerLayers []string) error {
	for _, lower := range lowerLayers {
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

// linkBelow creates a hard link to a target in a lower layer: it copies the target into this layer,
// like the copy-up of overlayfs.
func (u *unpacker) linkBelow(l hardLink, lowerLayers []string) error {
	for _, lower := range lowerLayers {
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
	file := &tar.Header{Typeflag: tar.TypeReg, Size: st.Size(), Mode: int64(sys.Mode & 0o7777), Uid: int(sys.Uid),
		Gid: int(sys.Gid), ModTime: st.ModTime()}
	if err := u.writeFile(l.name, file, src); err != nil {
		return err
	}
	return u.setAttributes(l.name, file)
}
