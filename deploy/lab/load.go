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

// Loaded is an image that the lab's registry has taken.
type Loaded struct {
	Name     string // under which pods may name it: the registry is a mirror of every other
	Registry string // its name in the registry itself
}

// Load puts the images of an archive into the lab's registry. Every worker asks that registry first, whatever registry
// an image's name begins with, so a pod names the image as the archive does. A bad archive leaves the registry as it
// was, or with the images before the bad one.
func (l *Lab) Load(ctx context.Context, path string) ([]Loaded, error) {
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
	options := []remote.Option{remote.WithContext(ctx), remote.WithTransport(h.toRegistry())}
	var out []Loaded
	for _, a := range images {
		ref, err := l.registryName(a.name)
		if err == nil {
			err = h.push(a, ref, options)
		}
		if err != nil {
			return out, fmt.Errorf("lab: loading %s of %s: %w", a.name, path, err)
		}
		out = append(out, Loaded{Name: a.name.String(), Registry: ref.String()})
	}
	return out, nil
}

// registryDialing bounds how long the registry may take to accept a connection.
const registryDialing = 30 * time.Second

// toRegistry is how images go to the registry, on its own host.
func (h Host) toRegistry() *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return h.dial(ctx, registryDialing, address)
	}}
}

// registryName is what an image is called in the lab's registry: its name without the registry that it begins with.
func (l *Lab) registryName(ref name.Reference) (name.Reference, error) {
	full := l.registryAddress() + "/" + ref.Context().RepositoryStr()
	if d, ok := ref.(name.Digest); ok {
		return name.NewDigest(full+"@"+d.DigestStr(), name.Insecure)
	}
	return name.NewTag(full+":"+ref.Identifier(), name.Insecure)
}

// push puts the blobs into the registry's folder, which is on this machine, and the manifests through its API.
func (h Host) push(a archived, ref name.Reference, options []remote.Option) error {
	blobs := blobFolder(h.registryFolder())
	if a.index == nil {
		if err := putImage(blobs, a.image); err != nil {
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
		if err := putImage(blobs, img); err != nil {
			return err
		}
	}
	return remote.WriteIndex(ref, a.index, options...)
}

// registryFolder is the registry's data as this machine sees it.
func (h Host) registryFolder() string { return filepath.Join(h.DataDir(), "registry") }

func putImage(blobs string, img v1.Image) error {
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return err
		}
		if err := putBlob(blobs, digest, layer.Compressed); err != nil {
			return fmt.Errorf("layer %s: %w", digest, err)
		}
	}
	return nil
}

// putBlob writes a blob under its digest, which its bytes must have. One that is there is not read.
func putBlob(blobs string, digest v1.Hash, open func() (io.ReadCloser, error)) (err error) {
	path := filepath.Join(blobs, digest.Algorithm, digest.Hex)
	if exists(path) {
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
		return fmt.Errorf("its bytes have the digest %s: the archive is damaged", got)
	}
	return os.Rename(out.Name(), path)
}

// waitRegistry waits until the registry answers.
func (l *Lab) waitRegistry(ctx context.Context) error {
	h, err := l.Host("registry")
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, beginning)
	defer cancel()
	err = wait.For(waiting, 20*time.Millisecond, func() error {
		if h.daemonPID() == 0 {
			cancel() // it will not come back by itself
			return fmt.Errorf("its daemon ended; the end of %s:\n%s", h.LogFile(), tail(h.LogFile(), 15))
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

// fillRegistry gives the registry the archives of the image folder.
func (l *Lab) fillRegistry(ctx context.Context) error {
	if err := l.waitRegistry(ctx); err != nil {
		return err
	}
	archives, err := l.archives()
	if err != nil {
		return err
	}
	for _, a := range archives {
		if _, err := l.Load(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// archives are the files of the image folder.
func (l *Lab) archives() ([]string, error) {
	if l.Config.ImageDir == "" {
		return nil, nil
	}
	return filepath.Glob(filepath.Join(l.Config.ImageDir, "*.tar"))
}
