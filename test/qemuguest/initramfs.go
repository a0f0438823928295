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

// archive writes files in the form that the kernel unpacks as its first root: cpio's "newc".
type archive struct {
	w    *bufio.Writer
	n    int64 // written, for the padding
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

// dir adds a folder and those above it.
func (a *archive) dir(name string) error {
	name = path.Clean(name)
	if a.dirs[name] {
		return nil
	}
	if err := a.dir(path.Dir(name)); err != nil {
		return err
	}
	a.dirs[name] = true
	return a.entry(name, modeDir|0o755, 0, strings.NewReader(""))
}

func (a *archive) link(name, target string) error {
	if err := a.dir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, modeLink|0o777, int64(len(target)), strings.NewReader(target))
}

func (a *archive) text(name, content string, mode int) error {
	if err := a.dir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, modeFile|mode, int64(len(content)), strings.NewReader(content))
}

// file adds one of the host's files.
func (a *archive) file(name, host string) error {
	f, err := os.Open(host)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if err := a.dir(path.Dir(name)); err != nil {
		return err
	}
	return a.entry(name, modeFile|int(st.Mode().Perm()), st.Size(), f)
}

func (a *archive) entry(name string, mode int, size int64, content io.Reader) error {
	a.ino++
	name = strings.TrimPrefix(name, "/")
	fields := []int64{int64(a.ino), int64(mode), 0, 0, 1, 0, size, 0, 0, 0, 0, int64(len(name) + 1), 0}
	head := "070701"
	for _, f := range fields {
		head += fmt.Sprintf("%08X", f)
	}
	if err := a.put(strings.NewReader(head + name + "\x00")); err != nil {
		return err
	}
	before := a.n
	if err := a.put(content); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	if a.n-before != (size+3)&^3 {
		return fmt.Errorf("add %s: it changed its size meanwhile", name)
	}
	return nil
}

// put copies, and fills up to four bytes.
func (a *archive) put(r io.Reader) error {
	n, err := io.Copy(a.w, r)
	pad := slices.Repeat([]byte{0}, int(-(a.n+n)&3))
	_, perr := a.w.Write(pad)
	a.n += n + int64(len(pad))
	return errors.Join(err, perr)
}

func (a *archive) close() error {
	if err := a.entry("TRAILER!!!", 0, 0, strings.NewReader("")); err != nil {
		return err
	}
	return a.w.Flush()
}
