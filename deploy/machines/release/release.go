// Package release reads a release of Keelson. The release is a folder with the result of 'make
// dist', a tarball in such a folder, or a tarball at a URL. A tarball at a URL is downloaded first.
// The file SHA256SUMS beside the tarball must contain the SHA-256 sum of each file. A file with
// another sum is refused.
package release

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
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

	"keelson.dev/keelson/deploy/machines/plan"
)

// Limits of a release: the size of a file, the size and number of files in a tar, and the size of
// SHA256SUMS.
const (
	maxFile     = 2 << 30
	maxUnpacked = 4 << 30
	maxFiles    = 10_000
	maxSums     = 1 << 20
)

const sumsFile = "SHA256SUMS"

var tarballName = regexp.MustCompile(`^keelson-([A-Za-z0-9._+-]{1,100})-linux-(amd64|arm64)\.tar\.gz$`)

// Open reads the release at location: a folder, a tarball, or the URL of a tarball. It verifies the
// SHA-256 sums of all files. Files at a URL are first downloaded into a folder below the folder
// cache.
func Open(ctx context.Context, location, cache string) (plan.Release, error) {
	r, err := openRelease(ctx, location, cache)
	if err != nil {
		return plan.Release{}, fmt.Errorf("release %s: %w", location, err)
	}
	return r, nil
}

// Version returns the version of the release at location, a folder, a tarball, or a URL. It reads
// only file names. It returns "" if there is no tarball, or if there are tarballs of different
// versions.
func Version(location string) (version string) {
	names := []string{path.Base(location)}
	if entries, err := os.ReadDir(location); err == nil {
		names = nil
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	for _, name := range names {
		m := tarballName.FindStringSubmatch(name)
		switch {
		case m == nil:
		case version != "" && version != m[1]:
			return ""
		default:
			version = m[1]
		}
	}
	return version
}

func openRelease(ctx context.Context, where, cache string) (plan.Release, error) {
	if strings.HasPrefix(where, "https://") || strings.HasPrefix(where, "http://") {
		folder, err := fetchRelease(ctx, where, cache)
		if err != nil {
			return plan.Release{}, err
		}
		return readRelease(folder, path.Base(where))
	}
	info, err := os.Stat(where)
	if err != nil {
		return plan.Release{}, err
	}
	if info.IsDir() {
		return readRelease(where, "")
	}
	return readRelease(filepath.Dir(where), filepath.Base(where))
}

// readRelease reads the release in a folder: the tarballs and image archives of all architectures.
// It verifies their SHA-256 sums. If tarball is a file name, readRelease reads the version of that
// tarball. If tarball is "", all tarballs in the folder must have the same version.
func readRelease(folder, tarball string) (plan.Release, error) {
	sums, err := readSums(filepath.Join(folder, sumsFile))
	if err != nil {
		return plan.Release{}, err
	}
	version := ""
	if tarball != "" {
		m := tarballName.FindStringSubmatch(tarball)
		if m == nil {
			return plan.Release{},
				errors.New("want a folder of 'make dist', or keelson-VERSION-linux-ARCH.tar.gz in one")
		}
		version = m[1]
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return plan.Release{}, err
	}
	r := plan.Release{Archives: map[string]plan.Archive{}}
	for _, e := range entries {
		m := tarballName.FindStringSubmatch(e.Name())
		if m == nil || version != "" && m[1] != version {
			continue
		}
		if r.Version != "" && r.Version != m[1] {
			return plan.Release{}, fmt.Errorf("there are %s and %s: name one tarball of it", r.Version, m[1])
		}
		r.Version = m[1]
		if r.Archives[m[2]], err = readArchive(folder, e.Name(), sums); err != nil {
			return plan.Release{}, err
		}
	}
	if len(r.Archives) == 0 {
		return plan.Release{}, errors.New("there is no keelson-VERSION-linux-ARCH.tar.gz: 'make dist' makes it")
	}
	return r, nil
}

// readArchive reads the release for one architecture: the tarball name and, if present, the tar of
// its images. It verifies both with sums, the content of SHA256SUMS by file name. The result
// contains the SHA-256 sum of every file that install.sh installs, by the path on a machine.
func readArchive(folder, name string, sums map[string]string) (plan.Archive, error) {
	a := plan.Archive{Sums: map[string]string{}, ImageSums: map[string]string{}}
	top := strings.TrimSuffix(name, ".tar.gz")
	var err error
	if a.Tarball, err = readFile(folder, name, sums, func(r io.Reader) error {
		zip, err := gzip.NewReader(r)
		if err != nil {
			return err
		}
		return sumMembers(zip, func(member string) string {
			return installedPath(strings.TrimPrefix(member, top))
		}, a.Sums)
	}); err != nil {
		return a, err
	}
	if len(a.Sums) == 0 {
		return a, fmt.Errorf("%s has nothing that could be installed", name)
	}
	images := top + "-images.tar"
	if _, listed := sums[images]; !listed {
		return a, nil
	}
	f, err := readFile(folder, images, sums, func(r io.Reader) error {
		return sumMembers(r, func(member string) string {
			return "/var/lib/keelson/images.d/" + path.Base(member)
		}, a.ImageSums)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return a, nil // nodes that can pull from a registry do not need the images
	}
	a.Images = &f
	return a, err
}

// installedPath returns the path on a machine at which install.sh installs a file of a release.
// member is the path of the file in the tarball, below the top folder. It returns "" if install.sh
// does not install the file, or changes its content.
func installedPath(member string) string {
	switch dir, name := path.Split(member); dir {
	case "/usr/bin/", "/opt/cni/bin/", "/usr/lib/systemd/system/":
		return member
	case "/":
		if name == "uninstall.sh" {
			return "/usr/lib/keelson/uninstall.sh"
		}
	}
	return ""
}

// sumMembers reads a tar, and stores the SHA-256 sum of each regular file in sums. It passes the
// name of the file in the tar to keyFor, and uses the result as the key in sums. Files for which
// keyFor returns "" are omitted.
func sumMembers(r io.Reader, keyFor func(member string) string, sums map[string]string) error {
	t := tar.NewReader(io.LimitReader(r, maxUnpacked))
	for n := 0; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n > maxFiles {
			return fmt.Errorf("it has more than %d files", maxFiles)
		}
		to := keyFor(h.Name)
		if h.Typeflag != tar.TypeReg || to == "" {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, t); err != nil {
			return err
		}
		sums[to] = hex.EncodeToString(sum.Sum(nil))
	}
}

// readFile passes the content of a file of the release to process, and returns the name, path,
// SHA-256 sum, and size of the file. It returns an error if sums does not contain the file, or
// contains another sum.
func readFile(folder, name string, sums map[string]string, process func(io.Reader) error) (plan.File, error) {
	want, ok := sums[name]
	if !ok {
		return plan.File{}, fmt.Errorf("%s is not in %s: it may have been renamed, or is of another release",
			name, sumsFile)
	}
	out := plan.File{Name: name, Path: filepath.Join(folder, name), Sum: want}
	f, err := os.Open(out.Path)
	if err != nil {
		return out, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return out, err
	}
	if out.Size = info.Size(); !info.Mode().IsRegular() || out.Size > maxFile {
		return out, fmt.Errorf("%s is no file of %d bytes at most", name, maxFile)
	}
	sum := sha256.New()
	r := io.TeeReader(bufio.NewReaderSize(f, 1<<20), sum)
	err = process(r)
	if _, rest := io.Copy(io.Discard, r); rest != nil {
		return out, fmt.Errorf("reading %s: %w", name, rest)
	}
	if is := hex.EncodeToString(sum.Sum(nil)); is != want {
		return out, fmt.Errorf("%s is not what its release has: its SHA-256 is %s, and %s says %s", name, is,
			sumsFile, want)
	}
	if err != nil {
		return out, fmt.Errorf("reading %s: %w", name, err)
	}
	return out, nil
}

var sumLine = regexp.MustCompile(`^([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._+-]*)$`)

func readSums(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("the sums of its files: %w", err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxSums))
	if err != nil {
		return nil, fmt.Errorf("the sums of its files: %w", err)
	}
	sums := map[string]string{}
	for line := range strings.Lines(string(raw)) {
		if m := sumLine.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			sums[m[2]] = m[1]
		}
	}
	if len(sums) == 0 {
		return nil, fmt.Errorf("%s has no sums", file)
	}
	return sums, nil
}

// architectures are the architectures that a release may contain.
var architectures = []string{"amd64", "arm64"}

// releaseFiles returns the names of the files that a release may contain: a tarball and an image
// archive for each architecture. tarball is the name of one of these tarballs, which comes first in
// the result. Any other file may be missing in the release.
func releaseFiles(tarball string) (names []string, err error) {
	m := tarballName.FindStringSubmatch(tarball)
	if m == nil {
		return nil, errors.New("want the URL of keelson-VERSION-linux-ARCH.tar.gz")
	}
	for _, arch := range architectures {
		top := "keelson-" + m[1] + "-linux-" + arch
		names = append(names, top+".tar.gz", top+"-images.tar")
	}
	// The tarball in the argument comes first.
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case a == tarball:
			return -1
		case b == tarball:
			return 1
		}
		return 0
	})
	return names, nil
}
