package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"keelson.dev/keelson/internal/durable"
)

const (
	maxManifest         = 4 << 20 // maximum size of a manifest in bytes, the usual limit of registries
	maxUpload           = 1 << 30 // maximum size of one request in bytes; larger layers must be pushed in chunks
	registryReadTimeout = 10 * time.Minute
)

// ServeRegistry runs an image registry at the address listen until ctx is canceled. It stores
// images in a folder, so that they are available again after a restart. It has no authentication,
// and is only for the hosts of a lab.
func ServeRegistry(ctx context.Context, listen, folder string) error {
	store := manifestStore(filepath.Join(folder, "manifests"))
	for _, dir := range []string{string(store), blobFolder(folder)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
	}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)),
		registry.WithBlobHandler(registry.NewDiskBlobHandler(blobFolder(folder))))
	if err := store.loadManifests(images); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	srv := &http.Server{
		Handler:           store.persistManifests(images),
		ReadHeaderTimeout: 10 * time.Second, ReadTimeout: registryReadTimeout, IdleTimeout: time.Minute,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	defer srv.Close()
	select {
	case <-ctx.Done():
		return nil
	case err := <-served:
		return err
	}
}

// blobFolder returns the folder below the registry's folder that contains layers and image
// configurations, each as ALGORITHM/DIGEST.
func blobFolder(folder string) string { return filepath.Join(folder, "blobs") }

// manifestStore stores the manifests of the registry in a folder, its value. The registry library
// stores blobs on disk, but manifests only in memory.
type manifestStore string

// storedManifest is the content of a file in a manifestStore: a manifest, and the fields of the
// request that pushes it to the registry.
type storedManifest struct {
	Path      string `json:"path"` // URL path: /v2/REPOSITORY/manifests/REFERENCE
	MediaType string `json:"mediaType"`
	Body      []byte `json:"body"`
}

func (m manifestStore) manifestFile(path string) string {
	sum := sha256.Sum256([]byte(path))
	return filepath.Join(string(m), hex.EncodeToString(sum[:])+".json")
}

// persistManifests returns a handler that forwards requests to images, the registry. It stores each
// manifest that the registry has accepted, and removes each one that the registry has deleted.
func (m manifestStore) persistManifests(images http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxUpload)
		if !strings.Contains(r.URL.Path, "/manifests/") || r.Method != http.MethodPut && r.Method != http.MethodDelete {
			images.ServeHTTP(w, r)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxManifest))
		if err != nil {
			http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		out := &codeWriter{ResponseWriter: w}
		images.ServeHTTP(out, r)
		switch {
		case r.Method == http.MethodPut && out.code == http.StatusCreated:
			err = m.writeManifest(storedManifest{Path: r.URL.Path, MediaType: r.Header.Get("Content-Type"), Body: body})
		case r.Method == http.MethodDelete && out.code == http.StatusAccepted:
			err = os.Remove(m.manifestFile(r.URL.Path))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Printf("registry: %s is lost at the next restart: %v", r.URL.Path, err)
		}
	})
}

func (m manifestStore) writeManifest(k storedManifest) error {
	raw, err := json.Marshal(k)
	if err != nil {
		return err
	}
	file := m.manifestFile(k.Path)
	return durable.WriteWith(file, raw, durable.Options{Level: durable.Atomic, Mode: 0o644})
}

// loadManifests pushes the stored manifests to images, the registry. Manifests of images come
// before image indexes, because the registry refuses an index without its images.
func (m manifestStore) loadManifests(images http.Handler) error {
	files, err := filepath.Glob(filepath.Join(string(m), "*.json"))
	if err != nil {
		return err
	}
	for _, indexes := range []bool{false, true} {
		for _, file := range files {
			raw, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			var k storedManifest
			if err := json.Unmarshal(raw, &k); err != nil {
				return fmt.Errorf("reading %s: %w: remove the file and load its image again", file, err)
			}
			if types.MediaType(k.MediaType).IsIndex() != indexes {
				continue
			}
			r, err := http.NewRequest(http.MethodPut, k.Path, bytes.NewReader(k.Body))
			if err != nil {
				return fmt.Errorf("reading %s: %w", file, err)
			}
			r.Header.Set("Content-Type", k.MediaType)
			out := &codeWriter{ResponseWriter: discardWriter{}}
			if images.ServeHTTP(out, r); out.code != http.StatusCreated {
				return fmt.Errorf("reading %s: %s is refused with %d: remove the file and load its image again",
					file, k.Path, out.code)
			}
		}
	}
	return nil
}

// codeWriter is an http.ResponseWriter that stores the status code of the response in code.
type codeWriter struct {
	http.ResponseWriter
	code int
}

// WriteHeader stores the status code and forwards it.
func (w *codeWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

// discardWriter is an http.ResponseWriter that discards the response.
type discardWriter struct{}

func (discardWriter) Header() http.Header         { return http.Header{} }
func (discardWriter) Write(p []byte) (int, error) { return len(p), nil }
func (discardWriter) WriteHeader(int)             {}
