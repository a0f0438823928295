package qemuguest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// archive writes files in cpio's "newc" format, which the kernel unpacks as its initial root file
// system.
type archive struct {
	w    *bufio.Writer
	n    int64 // bytes written, for the padding
	ino  int
	dirs map[string]bool
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), dirs: map[string]bool{"/": true}}
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeLink = 0o120000
)

// addFolder adds a folder and its missing parent folders to the archive.
func (a *archive) addFolder(name string) error {
	name = path.Clean(name)
	if a.dirs[name] {
		return nil
	}
	if err := a.addFolder(path.Dir(name)); err != nil {
		return err
	}
	a.dirs[name] = true
	return a.writeEntry(name, modeDir|0o755, 0, strings.NewReader(""))
}

func (a *archive) addLink(name, target string) error {
	if err := a.addFolder(path.Dir(name)); err != nil {
		return err
	}
	return a.writeEntry(name, modeLink|0o777, int64(len(target)), strings.NewReader(target))
}

func (a *archive) addText(name, content string, mode int) error {
	if err := a.addFolder(path.Dir(name)); err != nil {
		return err
	}
	return a.writeEntry(name, modeFile|mode, int64(len(content)), strings.NewReader(content))
}

// addFile adds a file of the host under another name, with its permissions.
func (a *archive) addFile(name, host string) error {
	f, err := os.Open(host)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if err := a.addFolder(path.Dir(name)); err != nil {
		return err
	}
	return a.writeEntry(name, modeFile|int(st.Mode().Perm()), st.Size(), f)
}

func (a *archive) writeEntry(name string, mode int, size int64, content io.Reader) error {
	a.ino++
	name = strings.TrimPrefix(name, "/")
	fields := []int64{int64(a.ino), int64(mode), 0, 0, 1, 0, size, 0, 0, 0, 0, int64(len(name) + 1), 0}
	head := "070701"
	for _, f := range fields {
		head += fmt.Sprintf("%08X", f)
	}
	if err := a.writePadded(strings.NewReader(head + name + "\x00")); err != nil {
		return err
	}
	before := a.n
	if err := a.writePadded(content); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	if a.n-before != (size+3)&^3 {
		return fmt.Errorf("add %s: the file changed its size meanwhile", name)
	}
	return nil
}

// writePadded copies the content of r to the archive and pads it to a multiple of four bytes.
func (a *archive) writePadded(r io.Reader) error {
	n, err := io.Copy(a.w, r)
	pad := slices.Repeat([]byte{0}, int(-(a.n+n)&3))
	_, perr := a.w.Write(pad)
	a.n += n + int64(len(pad))
	return errors.Join(err, perr)
}

func (a *archive) writeTrailer() error {
	if err := a.writeEntry("TRAILER!!!", 0, 0, strings.NewReader("")); err != nil {
		return err
	}
	return a.w.Flush()
}
