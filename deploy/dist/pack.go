package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
)

// file is a file that is installed on a machine.
type file struct {
	source string
	at     string // path on the machine
	mode   fs.FileMode
	config bool // a configuration file, which an upgrade does not overwrite
}

// installedFiles lists the installed files that are not programs.
var installedFiles = []struct {
	name, at string
	mode     fs.FileMode
	config   bool
}{
	{"agent.yaml", "/etc/keelson/agent.yaml", 0o600, true},
	{"controlplane.yaml", "/etc/keelson/controlplane.yaml", 0o600, true},
	{"keelson-agent.service", "/usr/lib/systemd/system/keelson-agent.service", 0o644, false},
	{"keelson-controlplane.service", "/usr/lib/systemd/system/keelson-controlplane.service", 0o644, false},
	{"keelson-pods.service", "/usr/lib/systemd/system/keelson-pods.service", 0o644, false},
	{"keelson.slice", "/usr/lib/systemd/system/keelson.slice", 0o644, false},
}

// scripts lists the scripts that the tarball contains at its top level. uninstall.sh is also
// installed.
var scripts = []string{"install.sh", "uninstall.sh"}

const uninstallAt = "/usr/lib/keelson/uninstall.sh"

// name returns the prefix of the names of the release's files.
func (r *release) name() string { return "keelson-" + r.version + "-linux-" + r.arch }

func (r *release) pack() error {
	all, err := r.files()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	for _, step := range []struct {
		file  string
		write func(io.Writer) error
	}{
		{r.name() + ".tar.gz", func(w io.Writer) error { return r.tarball(w, all) }},
		{r.name() + ".deb", func(w io.Writer) error { return r.deb(w, all) }},
		{r.name() + "-images.tar", r.bundle},
		{r.name() + ".cdx.json", func(w io.Writer) error { return r.bom(w, all) }},
	} {
		if err := replaceFile(filepath.Join(r.out, step.file), step.write); err != nil {
			return fmt.Errorf("making %s: %w", step.file, err)
		}
	}
	return nil
}

// files returns all files that the release installs on a machine, ordered by their path.
func (r *release) files() ([]file, error) {
	var all []file
	for _, dir := range []string{"usr/bin", "opt/cni/bin"} {
		entries, err := os.ReadDir(filepath.Join(r.root, dir))
		if err != nil {
			return nil, fmt.Errorf("what was built: %w", err)
		}
		for _, e := range entries {
			if !e.Type().IsRegular() {
				return nil, fmt.Errorf("what was built: %s is no file", filepath.Join(r.root, dir, e.Name()))
			}
			all = append(all, file{source: filepath.Join(r.root, dir, e.Name()),
				at: "/" + path.Join(dir, e.Name()), mode: 0o755})
		}
	}
	for _, b := range installedFiles {
		all = append(all, file{filepath.Join(r.install, b.name), b.at, b.mode, b.config})
	}
	slices.SortFunc(all, func(a, b file) int { return strings.Compare(a.at, b.at) })
	return all, nil
}

// tarball writes the release's tarball to w. It contains all files below one folder, with the
// scripts at the top of that folder.
func (r *release) tarball(w io.Writer, all []file) error {
	zip, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return err
	}
	t := tar.NewWriter(zip)
	made := map[string]bool{}
	add := func(f file) error {
		name := path.Join(r.name(), f.at)
		for i, c := range name {
			if dir := name[:i]; c == '/' && !made[dir] {
				made[dir] = true
				if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755,
					ModTime: r.when}); err != nil {
					return err
				}
			}
		}
		return r.addFile(t, f.source, name, f.mode)
	}
	for _, s := range scripts {
		all = append(all, file{source: filepath.Join(r.install, s), at: "/" + s, mode: 0o755})
	}
	for _, f := range all {
		if err := add(f); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), zip.Close())
}

func (r *release) addFile(t *tar.Writer, source, name string, mode fs.FileMode) error {
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: int64(mode), Size: info.Size(),
		ModTime: r.when}); err != nil {
		return err
	}
	_, err = io.Copy(t, f)
	return err
}

// bundle writes a tar with the release's image archives to w. An agent imports the image archives
// that are in the folder images.d of its state folder.
func (r *release) bundle(w io.Writer) error {
	t := tar.NewWriter(w)
	for _, image := range r.images {
		if err := r.addFile(t, image, filepath.Base(image), 0o644); err != nil {
			return err
		}
	}
	return t.Close()
}

var (
	numbered    = regexp.MustCompile(`^v?[0-9]+\.[0-9]`)
	prerelease  = regexp.MustCompile(`^(v?[0-9.]+)-((?:alpha|beta|rc)[0-9.]*)`)
	development = regexp.MustCompile(`^(v?[0-9.]+)-dev\b`)
)

// debVersion returns the release's version in Debian's form. In Debian's order, a development build
// and a prerelease are older than their release, and development builds are ordered by the time of
// their commits. A version without a number is older than every version with a number.
func (r *release) debVersion() string {
	when := r.when.Format("20060102150405")
	v := development.ReplaceAllString(r.version, "${1}~dev."+when)
	v = prerelease.ReplaceAllString(v, "$1~$2")
	v = strings.ReplaceAll(v, "-", "+")
	if numbered.MatchString(v) {
		return strings.TrimPrefix(v, "v")
	}
	return "0~" + when + "." + v
}

func (r *release) deb(w io.Writer, all []file) error {
	info := &nfpm.Info{
		Name: "keelson", Arch: r.arch, Platform: "linux", Version: r.debVersion(), VersionSchema: "none",
		Section: "admin", Priority: "optional",
		Maintainer: "Keelson <keelson@keelson.dev>", License: "Apache-2.0", DisableGlobbing: true, MTime: r.when,
		Description: "Kubernetes-compatible cluster\n The control plane, the agent of a node and kctl, " +
			"the command line.",
	}
	info.Depends = []string{"nftables"}
	info.Recommends = []string{"iptables"}
	info.Scripts.PreInstall = filepath.Join(r.install, "deb", "preinst")
	info.Scripts.PostInstall = filepath.Join(r.install, "deb", "postinst")
	info.Scripts.PreRemove = filepath.Join(r.install, "deb", "prerm")
	info.Scripts.PostRemove = filepath.Join(r.install, "deb", "postrm")
	// Only root can read the settings folder, because the settings may contain secrets.
	info.Contents = append(info.Contents, &files.Content{Type: files.TypeDir, Destination: "/etc/keelson",
		FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: 0o700, MTime: r.when}})
	for _, f := range append(all, file{source: filepath.Join(r.install, "uninstall.sh"), at: uninstallAt,
		mode: 0o755}) {
		c := &files.Content{Source: f.source, Destination: f.at,
			FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: f.mode, MTime: r.when}}
		if f.config {
			c.Type = files.TypeConfigNoReplace
		}
		info.Contents = append(info.Contents, c)
	}
	return deb.Default.Package(info, w)
}

// checksums writes the file SHA256SUMS into the folder dir. It contains the checksums of the files
// in dir that belong to the given version.
func checksums(dir, version string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var out strings.Builder
	for _, e := range entries {
		if !e.Type().IsRegular() || !strings.HasPrefix(e.Name(), "keelson-"+version+"-linux-") {
			continue
		}
		sum, err := sumOf(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&out, "%x  %s\n", sum, e.Name())
	}
	if out.Len() == 0 {
		return fmt.Errorf("there is nothing of version %s in %s", version, dir)
	}
	return replaceFile(filepath.Join(dir, "SHA256SUMS"), func(w io.Writer) error {
		_, err := io.WriteString(w, out.String())
		return err
	})
}

func sumOf(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// replaceFile atomically replaces the file at path with the content that write writes. It does not
// use internal/durable, because this directory is a module of its own.
func replaceFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+".new"))
	}
	return os.Rename(path+".new", path)
}
