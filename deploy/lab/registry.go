package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// ServeRegistry runs an image registry that holds the archives of a folder, each
// under the path of its own name: keelson.dev/hello:v1 is ADDRESS/hello:v1.
func ServeRegistry(ctx context.Context, listen, folder string) error {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	srv := &http.Server{
		Handler:           registry.New(registry.Logger(log.New(io.Discard, "", 0))),
		ReadHeaderTimeout: 10 * time.Second,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	defer srv.Close()
	archives, err := filepath.Glob(filepath.Join(folder, "*.tar"))
	if err != nil {
		return err
	}
	for _, a := range archives {
		if err := push(ctx, a, ln.Addr().String()); err != nil {
			return fmt.Errorf("registry: loading %s: %w", a, err)
		}
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-served:
		return err
	}
}

// push uploads every named image of an OCI archive.
func push(ctx context.Context, archive, address string) error {
	dir, err := os.MkdirTemp("", "keelson-registry-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := untar(archive, dir); err != nil {
		return err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		ref := imageName(d)
		if ref == "" {
			return errors.New("an image of the archive has no name (annotation org.opencontainers.image.ref.name)")
		}
		_, path, _ := strings.Cut(ref, "/")
		target, err := name.ParseReference(address+"/"+path, name.Insecure)
		if err != nil {
			return err
		}
		img, err := index.Image(d.Digest)
		if err != nil {
			return err
		}
		if err := remote.Write(target, img, remote.WithContext(ctx)); err != nil {
			return err
		}
	}
	return nil
}

func imageName(d v1.Descriptor) string {
	for _, key := range []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"} {
		if n := d.Annotations[key]; strings.Contains(n, "/") {
			return n
		}
	}
	return ""
}
