package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"strings"
)

// program is a program of the release with its build information.
type program struct {
	ref  string // its location: "file:/usr/bin/kctl" or "image:entry.tar/keelson-entry"
	name string
	sum  [sha256.Size]byte
	info *buildinfo.BuildInfo
}

// keelsonModule is the path of Keelson's module. Code in this module or in a module below it has
// the release's version. It is not listed as a separate component in the bill of materials.
const keelsonModule = "keelson.dev/keelson"

// programs returns the programs among the installed files and in the images.
func (r *release) programs(all []file) ([]program, error) {
	var found []program
	for _, f := range all {
		if f.mode != 0o755 {
			continue
		}
		content, err := os.ReadFile(f.source)
		if err != nil {
			return nil, err
		}
		p, err := read("file:"+f.at, content)
		if err != nil {
			return nil, err
		}
		found = append(found, p)
	}
	for _, image := range r.images {
		inside, err := imagePrograms(image)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(image), err)
		}
		found = append(found, inside...)
	}
	return found, nil
}

func read(ref string, content []byte) (program, error) {
	p := program{ref: ref, name: path.Base(ref), sum: sha256.Sum256(content)}
	var err error
	if p.info, err = buildinfo.Read(bytes.NewReader(content)); err != nil {
		return p, fmt.Errorf("what %s is made of: %w", p.name, err)
	}
	return p, nil
}

// imagePrograms returns the programs in the layers of an image archive. The other parts of the
// archive, which describe the layers, are not compressed.
func imagePrograms(archive string) ([]program, error) {
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var found []program
	err = eachFile(f, func(_ *tar.Header, blob io.Reader) error {
		layer, err := gzip.NewReader(blob)
		if errors.Is(err, gzip.ErrHeader) {
			return nil
		}
		if err != nil {
			return err
		}
		return eachFile(layer, func(h *tar.Header, file io.Reader) error {
			if h.Mode&0o111 == 0 {
				return nil
			}
			content, err := io.ReadAll(file)
			if err != nil {
				return err
			}
			p, err := read("image:"+path.Join(filepath.Base(archive), h.Name), content)
			found = append(found, p)
			return err
		})
	})
	if err == nil && len(found) == 0 {
		err = errors.New("no layer of it has a program: an image of a release has one, and its layers are " +
			"compressed with gzip")
	}
	return found, err
}

// eachFile calls visit for each regular file of a tar archive.
func eachFile(archive io.Reader, visit func(*tar.Header, io.Reader) error) error {
	for t := tar.NewReader(archive); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && h.Typeflag == tar.TypeReg {
			err = visit(h, t)
		}
		if err != nil {
			return err
		}
	}
}

// foreign returns the module that contains a program which is not part of Keelson. It returns nil
// for a program of Keelson, and if the module of the program is not known.
func (p *program) foreign() *debug.Module {
	if m := p.info.Main; m.Path != "" && m.Path != keelsonModule && !strings.HasPrefix(m.Path, keelsonModule+"/") {
		return replacement(&m)
	}
	return nil
}

// modules returns all modules that a program is built from, except Keelson's.
func (p *program) modules() []*debug.Module {
	all := []*debug.Module{{Path: "stdlib", Version: p.info.GoVersion}}
	if m := p.foreign(); m != nil {
		all = append(all, m)
	}
	for _, m := range p.info.Deps {
		all = append(all, replacement(m))
	}
	return all
}

func replacement(m *debug.Module) *debug.Module {
	if m.Replace != nil {
		return m.Replace
	}
	return m
}
