package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"keelson.dev/keelson/internal/wait"
)

// LoadedImage is an image in the lab's registry.
type LoadedImage struct {
	Name     string // name in pods: the registry is a mirror of all others
	Registry string // name in the registry itself
}

// LoadArchive pushes the images of an archive to the lab's registry. Every worker asks that
// registry first for any image, so pods use the names of the archive. After an error, the registry
// contains only the images before the faulty one.
func (l *Lab) LoadArchive(ctx context.Context, path string) ([]LoadedImage, error) {
	h, err := l.Host("registry")
	if err != nil {
		return nil, err
	}
	images, closeArchive, err := openArchive(path)
	if err != nil {
		return nil, fmt.Errorf("lab: reading %s: %w", path, err)
	}
	defer closeArchive()
	if len(images) == 0 {
		return nil, fmt.Errorf("lab: %s holds no image", path)
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithTransport(h.registryTransport())}
	var out []LoadedImage
	for _, a := range images {
		ref, err := l.registryName(a.name)
		if err == nil {
			err = h.pushImage(a, ref, options)
		}
		if err != nil {
			return out, fmt.Errorf("lab: loading %s of %s: %w", a.name, path, err)
		}
		out = append(out, LoadedImage{Name: a.name.String(), Registry: ref.String()})
	}
	return out, nil
}

// registryDialTimeout is the maximum time until the registry accepts a connection.
const registryDialTimeout = 30 * time.Second

// registryTransport returns a transport that connects to the registry on its host.
func (h Host) registryTransport() *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return h.dialWithTimeout(ctx, registryDialTimeout, address)
	}}
}

// registryName returns an image's name in the lab's registry: its name with another registry host.
func (l *Lab) registryName(ref name.Reference) (name.Reference, error) {
	full := l.registryAddress() + "/" + ref.Context().RepositoryStr()
	if d, ok := ref.(name.Digest); ok {
		return name.NewDigest(full+"@"+d.DigestStr(), name.Insecure)
	}
	return name.NewTag(full+":"+ref.Identifier(), name.Insecure)
}

// pushImage writes blobs to the registry's folder, which is on this machine, and manifests through
// its API.
func (h Host) pushImage(a archivedImage, ref name.Reference, options []remote.Option) error {
	blobs := blobFolder(h.registryFolder())
	if a.index == nil {
		if err := storeImage(blobs, a.image); err != nil {
			return err
		}
		return remote.Write(ref, a.image, options...)
	}
	manifest, err := a.index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		if !d.MediaType.IsImage() {
			continue
		}
		img, err := a.index.Image(d.Digest)
		if err != nil {
			return err
		}
		if err := storeImage(blobs, img); err != nil {
			return err
		}
	}
	return remote.WriteIndex(ref, a.index, options...)
}

// registryFolder returns the folder of the registry's data on this machine.
func (h Host) registryFolder() string { return filepath.Join(h.DataDir(), "registry") }

func storeImage(blobs string, img v1.Image) error {
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return err
		}
		if err := storeBlob(blobs, digest, layer.Compressed); err != nil {
			return fmt.Errorf("layer %s: %w", digest, err)
		}
	}
	return nil
}

// storeBlob writes a blob and verifies its digest. An existing blob is not read.
func storeBlob(blobs string, digest v1.Hash, open func() (io.ReadCloser, error)) (err error) {
	path := filepath.Join(blobs, digest.Algorithm, digest.Hex)
	if fileExists(path) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	in, err := open()
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(blobs, "load-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(out.Name()))
		}
	}()
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, sum), in)
	if err := errors.Join(err, out.Close()); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != digest.Hex {
		return fmt.Errorf("its content has the digest %s: the archive is damaged", got)
	}
	return os.Rename(out.Name(), path)
}

// waitRegistry waits until the registry responds.
func (l *Lab) waitRegistry(ctx context.Context) error {
	h, err := l.Host("registry")
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = wait.For(waiting, 20*time.Millisecond, func() error {
		if h.daemonPID() == 0 {
			cancel() // the daemon does not restart by itself
			return fmt.Errorf("its daemon exited; the end of %s:\n%s", h.LogFile(), lastLines(h.LogFile(), 15))
		}
		conn, err := h.Dial(waiting, l.registryAddress())
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return fmt.Errorf("the registry does not answer: %w", err)
	}
	return nil
}

// fillRegistry loads the archives of the image folder into the registry.
func (l *Lab) fillRegistry(ctx context.Context) error {
	if err := l.waitRegistry(ctx); err != nil {
		return err
	}
	archives, err := l.archives()
	if err != nil {
		return err
	}
	for _, a := range archives {
		if _, err := l.LoadArchive(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// archives returns the files of the image folder.
func (l *Lab) archives() ([]string, error) {
	if l.Config.ImageDir == "" {
		return nil, nil
	}
	return filepath.Glob(filepath.Join(l.Config.ImageDir, "*.tar"))
}
