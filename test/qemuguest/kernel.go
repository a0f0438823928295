package qemuguest

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// kernel is a Debian kernel as unpacked by "scripts/setup guest": the image and its modules by
// name. Programs for the guest that are not installed on the host are in root.
type kernel struct {
	image     string
	modules   map[string]string
	root      string   // of the unpacked packages
	libraries []string // library folders below root
}

func openKernel(dir string) (*kernel, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	k := &kernel{image: filepath.Join(dir, "vmlinuz"), modules: map[string]string{}, root: filepath.Join(dir, "root")}
	if _, err := os.Stat(k.image); err != nil {
		return nil, err
	}
	for _, lib := range []string{"lib", "usr/lib"} {
		k.libraries = append(k.libraries, filepath.Join(k.root, lib, "x86_64-linux-gnu"))
	}
	err = filepath.WalkDir(filepath.Join(dir, "modules"), func(p string, d fs.DirEntry, err error) error {
		if name, ok := strings.CutSuffix(d.Name(), ".ko"); ok && err == nil {
			k.modules[strings.ReplaceAll(name, "-", "_")] = p
		}
		return err
	})
	return k, err
}

// orderModules returns the files of modules and their dependencies, with each module after its
// dependencies. A name without a file is a module that is built into the kernel, and is skipped.
func (k *kernel) orderModules(names ...string) (files []string, err error) {
	for _, name := range names {
		file, ok := k.modules[strings.ReplaceAll(name, "-", "_")]
		if !ok || slices.Contains(files, file) {
			continue
		}
		needs, err := moduleDependencies(file)
		if err != nil {
			return nil, err
		}
		before, err := k.orderModules(needs...)
		if err != nil {
			return nil, err
		}
		for _, f := range append(before, file) {
			if !slices.Contains(files, f) {
				files = append(files, f)
			}
		}
	}
	return files, nil
}

// moduleDependencies returns the names of the modules on which a module depends, from its .modinfo
// section.
func moduleDependencies(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", file, err)
	}
	defer f.Close()
	s := f.Section(".modinfo")
	if s == nil {
		return nil, fmt.Errorf("read module %s: it has no .modinfo", file)
	}
	info, err := s.Data()
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", file, err)
	}
	for _, field := range bytes.Split(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(field, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(string(list), ","), nil
		}
	}
	return nil, nil
}
