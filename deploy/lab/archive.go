package lab

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// archivedImage is an image or an image index in an image archive, and the name that the archive
// gives it.
type archivedImage struct {
	name  name.Reference
	image v1.Image      // nil for an image index
	index v1.ImageIndex // nil for an image
}

// openArchive opens the images in an archive: an OCI layout as a folder or a tar, or the output of
// 'docker save'. A tar may be compressed with gzip. The caller must call closeArchive after it has
// read the images.
func openArchive(path string) (found []archivedImage, closeArchive func() error, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, err
	}
	if info.IsDir() {
		found, err = layoutImages(path)
		return found, func() error { return nil }, err
	}
	dir, err := os.MkdirTemp("", "keelson-load-")
	if err != nil {
		return nil, nil, err
	}
	remove := func() error { return os.RemoveAll(dir) }
	defer func() {
		if err != nil {
			err = errors.Join(err, remove())
		}
	}()
	plain, err := decompressGzip(path, dir)
	if err != nil {
		return nil, nil, err
	}
	unpacked := filepath.Join(dir, "layout")
	if err := os.Mkdir(unpacked, 0o700); err != nil {
		return nil, nil, err
	}
	if err := extractTar(plain, unpacked); err != nil {
		return nil, nil, fmt.Errorf("%w: an archive of images is a tar of an OCI layout, or what 'docker save' writes",
			err)
	}
	// 'docker save' writes both formats into one archive. Only manifest.json contains the image
	// names.
	switch {
	case fileExists(filepath.Join(unpacked, "manifest.json")):
		found, err = dockerImages(plain)
	case fileExists(filepath.Join(unpacked, "index.json")):
		found, err = layoutImages(unpacked)
	default:
		err = errors.New("it holds neither index.json nor manifest.json: " +
			"an archive of images is a tar of an OCI layout, or what 'docker save' writes")
	}
	return found, remove, err
}

// decompressGzip returns the path of a file with the decompressed content of the file path. If path
// is not compressed, it returns path. Otherwise it writes the decompressed content to a file in
// dir.
func decompressGzip(path, dir string) (string, error) {
	in, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer in.Close()
	r := bufio.NewReader(in)
	if magic, err := r.Peek(2); err != nil || !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		return path, nil
	}
	z, err := gzip.NewReader(r)
	if err != nil {
		return "", err
	}
	plain := filepath.Join(dir, "plain.tar")
	out, err := os.Create(plain)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(out, z)
	return plain, errors.Join(err, out.Close())
}

func dockerImages(path string) ([]archivedImage, error) {
	open := func() (io.ReadCloser, error) { return os.Open(path) }
	manifest, err := tarball.LoadManifest(open)
	if err != nil {
		return nil, err
	}
	var out []archivedImage
	for _, d := range manifest {
		if len(d.RepoTags) == 0 {
			return nil,
				errors.New("an image of the archive has no name: save it by name ('docker save NAME:TAG'), not by id")
		}
		for _, t := range d.RepoTags {
			tag, err := name.NewTag(t)
			if err != nil {
				return nil, err
			}
			img, err := tarball.Image(open, &tag)
			if err != nil {
				return nil, fmt.Errorf("image %s: %w", t, err)
			}
			out = append(out, archivedImage{name: tag, image: img})
		}
	}
	return out, nil
}

func layoutImages(dir string) ([]archivedImage, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	var out []archivedImage
	for _, d := range manifest.Manifests {
		text := imageName(d)
		if text == "" {
			return nil,
				errors.New("an image of the archive has no name (annotation org.opencontainers.image.ref.name, " +
					"as NAME:TAG with the repository): write it with a tool that names it")
		}
		a := archivedImage{}
		if a.name, err = name.ParseReference(text); err != nil {
			return nil, err
		}
		if d.MediaType.IsIndex() {
			a.index, err = index.ImageIndex(d.Digest)
			a.index = withoutAbsentImages(a.index)
		} else {
			a.image, err = index.Image(d.Digest)
		}
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", text, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// withoutAbsentImages returns an image index without the images that its archive does not contain.
// Some tools save one platform of several and leave the index unchanged.
func withoutAbsentImages(index v1.ImageIndex) v1.ImageIndex {
	if index == nil {
		return nil
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return index // the function that writes the index reports the error
	}
	absent := func(d v1.Descriptor) bool {
		img, err := index.Image(d.Digest)
		if err == nil {
			_, err = img.RawConfigFile()
		}
		return d.MediaType.IsImage() && err != nil
	}
	if !slices.ContainsFunc(manifest.Manifests, absent) {
		return index
	}
	return mutate.RemoveManifests(index, absent)
}

func imageName(d v1.Descriptor) string {
	for _, key := range []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"} {
		if n := d.Annotations[key]; strings.ContainsAny(n, "/:") {
			return n
		}
	}
	return ""
}
