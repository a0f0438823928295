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

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wait"
)

// registryLoader fills the registry of a lab, and the image folders of its hosts, from image
// archives.
type registryLoader struct{ lab *Lab }

// LoadedImage contains the names of an image that LoadArchive has pushed to the lab's registry.
type LoadedImage struct {
	Name     string // name for pods, as in the archive; the registry mirrors all registries
	Registry string // name with the address of the lab's registry
}

// LoadArchive pushes the images of an archive to the lab's registry, and returns their names. The
// workers try that registry first for every image, so pods use the names in the archive. After an
// error, the registry contains the images before the one that failed.
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
		ref, err := l.registry().registryName(a.name)
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

// registryDialTimeout is the maximum duration of connecting to the lab's registry.
const registryDialTimeout = 30 * time.Second

// registryTransport returns an HTTP transport that connects from the network namespace of the host
// h, on which the lab's registry runs. The machine itself has no route to the registry.
func (h Host) registryTransport() *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
		return h.dialWithTimeout(ctx, registryDialTimeout, address)
	}}
}

// registryName returns ref with the address of the lab's registry in place of the registry in ref.
func (r registryLoader) registryName(ref name.Reference) (name.Reference, error) {
	full := r.lab.hosts().registryAddress() + "/" + ref.Context().RepositoryStr()
	if d, ok := ref.(name.Digest); ok {
		return name.NewDigest(full+"@"+d.DigestStr(), name.Insecure)
	}
	return name.NewTag(full+":"+ref.Identifier(), name.Insecure)
}

// pushImage stores an image or an image index as ref in the registry on the host h. It writes
// layers directly to the registry's folder on this machine, and manifests through the registry's
// API.
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

// registryFolder returns the folder on this machine that contains the data of the registry on the
// host h.
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

// storeBlob writes the content that open returns to the file of the blob with this digest, below
// the folder blobs. It returns an error if the content has another digest. If the file exists, it
// does nothing.
func storeBlob(blobs string, digest v1.Hash, open func() (io.ReadCloser, error)) error {
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
	out, err := durable.Create(path, durable.Options{Level: durable.Atomic, TempDir: blobs, TempPattern: "load-*"})
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, sum), in)
	if got := hex.EncodeToString(sum.Sum(nil)); err == nil && got != digest.Hex {
		err = fmt.Errorf("its content has the digest %s: the archive is damaged", got)
	}
	if err != nil {
		return errors.Join(err, out.Discard())
	}
	return out.Commit()
}

// waitRegistry waits until the lab's registry accepts connections.
func (r registryLoader) waitRegistry(ctx context.Context) error {
	h, err := r.lab.Host("registry")
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = wait.For(waiting, 20*time.Millisecond, func() error {
		if h.daemonPID() == 0 {
			cancel() // nothing restarts the daemon
			return fmt.Errorf("its daemon exited; the end of %s:\n%s", h.LogFile(), lastLines(h.LogFile(), 15))
		}
		conn, err := h.Dial(waiting, r.lab.hosts().registryAddress())
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

// fillRegistry waits for the lab's registry, and loads all archives in Config.ImageDir into it.
func (r registryLoader) fillRegistry(ctx context.Context) error {
	if err := r.waitRegistry(ctx); err != nil {
		return err
	}
	archives, err := r.lab.hosts().archives()
	if err != nil {
		return err
	}
	for _, a := range archives {
		if _, err := r.lab.LoadArchive(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// archives returns the paths of the image archives in Config.ImageDir.
func (hb hostBuilder) archives() ([]string, error) {
	if hb.config.ImageDir == "" {
		return nil, nil
	}
	return filepath.Glob(filepath.Join(hb.config.ImageDir, "*.tar"))
}
