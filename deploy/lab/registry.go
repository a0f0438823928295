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
)

const (
	maxManifest     = 4 << 20 // bytes of a manifest, as registries commonly allow
	maxUpload       = 1 << 30 // bytes of one request: a push of a larger layer comes in chunks
	registryReading = 10 * time.Minute
)

// ServeRegistry runs an image registry whose images lie in a folder and are there again after a restart. It has no
// accounts: it is for the hosts of a lab.
func ServeRegistry(ctx context.Context, listen, folder string) error {
	store := manifestFolder(filepath.Join(folder, "manifests"))
	for _, dir := range []string{string(store), blobFolder(folder)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("registry: %w", err)
		}
	}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)),
		registry.WithBlobHandler(registry.NewDiskBlobHandler(blobFolder(folder))))
	if err := store.replay(images); err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	srv := &http.Server{
		Handler:           store.keep(images),
		ReadHeaderTimeout: 10 * time.Second, ReadTimeout: registryReading, IdleTimeout: time.Minute,
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

// blobFolder holds layers and configurations, as ALGORITHM/DIGEST.
func blobFolder(folder string) string { return filepath.Join(folder, "blobs") }

// manifestFolder is where manifests are kept: the library keeps blobs on disk, but manifests in memory alone.
type manifestFolder string

// kept is a manifest on disk.
type kept struct {
	Path      string `json:"path"` // of the URL: /v2/REPOSITORY/manifests/REFERENCE
	MediaType string `json:"mediaType"`
	Body      []byte `json:"body"`
}

func (m manifestFolder) file(path string) string {
	sum := sha256.Sum256([]byte(path))
	return filepath.Join(string(m), hex.EncodeToString(sum[:])+".json")
}

// keep writes down what the registry has taken, and removes what it has removed.
func (m manifestFolder) keep(images http.Handler) http.Handler {
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
			err = m.write(kept{Path: r.URL.Path, MediaType: r.Header.Get("Content-Type"), Body: body})
		case r.Method == http.MethodDelete && out.code == http.StatusAccepted:
			err = os.Remove(m.file(r.URL.Path))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Printf("registry: %s is lost at the next restart: %v", r.URL.Path, err)
		}
	})
}

func (m manifestFolder) write(k kept) error {
	raw, err := json.Marshal(k)
	if err != nil {
		return err
	}
	file := m.file(k.Path)
	if err := os.WriteFile(file+".new", raw, 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// replay gives the registry what is on disk: images first, because an index is taken only when its images are there.
func (m manifestFolder) replay(images http.Handler) error {
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
			var k kept
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
			out := &codeWriter{ResponseWriter: nowhere{}}
			if images.ServeHTTP(out, r); out.code != http.StatusCreated {
				return fmt.Errorf("reading %s: %s is refused with %d: remove the file and load its image again",
					file, k.Path, out.code)
			}
		}
	}
	return nil
}

// codeWriter remembers the code of an answer.
type codeWriter struct {
	http.ResponseWriter
	code int
}

// WriteHeader implements http.ResponseWriter.
func (w *codeWriter) WriteHeader(code int) {
	w.code = code
	w.ResponseWriter.WriteHeader(code)
}

// nowhere takes an answer that nobody reads.
type nowhere struct{}

func (nowhere) Header() http.Header         { return http.Header{} }
func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) WriteHeader(int)             {}
