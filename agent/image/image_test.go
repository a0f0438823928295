package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

func testContext(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

// openStore runs a store; the returned function stops it.
func openStore(t *testing.T, cfg Config) (*Store, func()) {
	t.Helper()
	needRoot(t)
	if cfg.Root == "" {
		cfg.Root = t.TempDir()
	}
	var text bytes.Buffer
	var mu sync.Mutex
	cfg.Logger = slog.New(slog.NewTextHandler(lockedWriter{&mu, &text}, nil))
	s := New(cfg)
	run, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(run) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(text.String())
		}
	})
	t.Cleanup(stop)
	return s, stop
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// newTestImage returns an image with one layer per set of entries.
func newTestImage(t *testing.T, layers ...[]entry) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image,
		&v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: v1.Config{
			Env: []string{"A=b"}, Entrypoint: []string{"/run"}, Cmd: []string{"x"}, User: "app", WorkingDir: "/w",
			StopSignal: "SIGINT", Volumes: map[string]struct{}{"/v": {}}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, entries := range layers {
		b := newArchive(t, entries...)
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(b)), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

// fakeRegistry serves images on loopback and counts requests.
type fakeRegistry struct {
	host            string
	manifests, blob atomic.Int64
	user, password  string // required if set
	corrupt         atomic.Bool
}

func newRegistry(t *testing.T) *fakeRegistry {
	t.Helper()
	f := &fakeRegistry{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if f.user != "" {
			if u, p, _ := q.BasicAuth(); u != f.user || p != f.password {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				http.Error(w, "who are you", http.StatusUnauthorized)
				return
			}
		}
		if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/manifests/") {
			f.manifests.Add(1)
		}
		if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
			f.blob.Add(1)
			if f.corrupt.Load() {
				rec := httptest.NewRecorder()
				inner.ServeHTTP(rec, q)
				b := rec.Body.Bytes()
				b[len(b)/2] ^= 0xff
				_, _ = w.Write(b)
				return
			}
		}
		inner.ServeHTTP(w, q)
	}))
	t.Cleanup(srv.Close)
	f.host = strings.TrimPrefix(srv.URL, "http://")
	return f
}

func (f *fakeRegistry) pushImage(t *testing.T, ref string, img v1.Image) {
	t.Helper()
	r, err := name.ParseReference(f.host+"/"+ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
}

func pullImage(t *testing.T, s *Store, image string, auth *cri.AuthConfig) (string, error) {
	out, err := s.PullImage(testContext(t), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}, Auth: auth})
	return out.GetImageRef(), err
}

// F106
func TestPullOnceThenNoBytes(t *testing.T) {
	reg := newRegistry(t)
	img := newTestImage(t, []entry{{name: "run", content: "1"}}, []entry{{name: "more", content: "2"}})
	reg.pushImage(t, "team/app:v1", img)
	s, stop := openStore(t, Config{Insecure: []string{reg.host}})
	var wg sync.WaitGroup
	for range 8 { // concurrent pulls are merged
		wg.Go(func() {
			if _, err := pullImage(t, s, reg.host+"/team/app:v1", nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := reg.blob.Load(); n != 3 {
		t.Errorf("%d blobs were fetched for 8 pulls of two layers and a config", n)
	}
	reg.manifests.Store(0)
	id, err := pullImage(t, s, reg.host+"/team/app:v1", nil)
	if err != nil || reg.manifests.Load() > 1 || reg.blob.Load() != 3 {
		t.Errorf("pulling what is there: %v, %d manifests, %d blobs", err, reg.manifests.Load(), reg.blob.Load())
	}
	want, _ := img.ConfigName()
	digest, _ := img.Digest()
	if id != want.String() {
		t.Errorf("image ref %s, want %s", id, want)
	}
	// A pull by digest sends no request.
	reg.manifests.Store(0)
	if _, err := pullImage(t, s, reg.host+"/team/app@"+digest.String(), nil); err != nil || reg.manifests.Load() != 0 {
		t.Errorf("by digest: %v, %d requests", err, reg.manifests.Load())
	}
	for _, ref := range []string{reg.host + "/team/app:v1", reg.host + "/team/app@" + digest.String(), id, id[7:20]} {
		st, err := s.ImageStatus(testContext(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
		if err != nil || st.Image.GetId() != id || st.Image.GetUsername() != "app" {
			t.Errorf("status of %s: %v, %v", ref, st, err)
		}
	}
	c, err := s.Config(testContext(t), reg.host+"/team/app:v1")
	if err != nil || c.ID != id || !strings.HasSuffix(c.Digest, "@"+digest.String()) || c.StopSignal != "SIGINT" ||
		c.User != "app" || !slices.Equal(c.Volumes, []string{"/v"}) {
		t.Errorf("config: %+v, %v", c, err)
	}
	// Everything persists across a restart. Temporary data of a killed run is removed.
	stop()
	if err := os.MkdirAll(s.storePath("tmp", "layer-half", "fs"), 0o755); err != nil {
		t.Fatal(err)
	}
	reg.manifests.Store(0)
	s2, _ := openStore(t, Config{Root: s.cfg.Root, Insecure: []string{reg.host}})
	if st, err := s2.ImageStatus(testContext(t),
		&cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: reg.host + "/team/app:v1"}}); err != nil ||
		st.Image.GetId() != id {
		t.Errorf("after a restart: %v, %v", st, err)
	}
	if e, err := os.ReadDir(s.storePath("tmp")); err != nil || len(e) != 0 {
		t.Errorf("scratch after a restart: %v, %v", e, err)
	}
}

func TestPullErrorsSayWhatAndWhere(t *testing.T) {
	reg := newRegistry(t)
	reg.pushImage(t, "app:v1", newTestImage(t, []entry{{name: "f", content: strings.Repeat("content ", 100)}}))
	s, _ := openStore(t, Config{Insecure: []string{reg.host}})
	if _, err := pullImage(t, s, "UPPER/case:x", nil); !errors.Is(err, agent.ErrInvalidImage) {
		t.Errorf("bad name: %v", err)
	}
	if _, err := pullImage(t, s, reg.host+"/app:v9", nil); !errors.Is(err, agent.ErrImagePull) ||
		!strings.Contains(err.Error(), "app:v9") {
		t.Errorf("missing tag: %v", err)
	}
	reg.corrupt.Store(true)
	if _, err := pullImage(t, s, reg.host+"/app:v1", nil); err == nil || !strings.Contains(err.Error(), "app:v1") {
		t.Errorf("corrupt blob: %v", err)
	}
	reg.corrupt.Store(false)
	if _, err := pullImage(t, s, reg.host+"/app:v1", nil); err != nil {
		t.Errorf("after the registry is well again: %v", err)
	}
	plain, _ := openStore(t, Config{})
	if _, err := pullImage(t, plain, reg.host+"/app:v1", nil); err == nil ||
		!strings.Contains(err.Error(), "plain HTTP is not allowed") {
		t.Errorf("a registry that is not configured as insecure: %v", err)
	}
	reg.user, reg.password = "me", "secret"
	fresh, _ := openStore(t, Config{Insecure: []string{reg.host}})
	if _, err := pullImage(t, fresh, reg.host+"/app:v1", nil); !errors.Is(err, agent.ErrImagePull) {
		t.Errorf("without credentials: %v", err)
	}
	if _, err := pullImage(t, fresh, reg.host+"/app:v1", &cri.AuthConfig{Username: "me", Password: "secret"}); err !=
		nil {
		t.Errorf("with credentials: %v", err)
	}
}

func TestMirrorComesFirst(t *testing.T) {
	reg := newRegistry(t)
	reg.pushImage(t, "library/busybox:latest", newTestImage(t, []entry{{name: "f", content: "x"}}))
	s, _ := openStore(t, Config{Insecure: []string{reg.host}, Mirrors: map[string][]string{"docker.io": {reg.host}}})
	if _, err := pullImage(t, s, "busybox", nil); err != nil {
		t.Fatal(err)
	}
	st, err := s.ImageStatus(testContext(t),
		&cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "docker.io/library/busybox:latest"}})
	if err != nil || !slices.Contains(st.Image.GetRepoTags(), "docker.io/library/busybox:latest") {
		t.Errorf("%v, %v", st, err)
	}
}

// A mirror for all registries is tried first for registries without their own mirrors, without the
// registry's credentials.
func TestMirrorOfEveryRegistry(t *testing.T) {
	reg := newRegistry(t)
	reg.pushImage(t, "team/app:v1", newTestImage(t, []entry{{name: "f", content: "x"}}))
	everywhere := map[string][]string{"*": {reg.host}}
	s, _ := openStore(t, Config{Insecure: []string{reg.host}, Mirrors: everywhere})
	for _, image := range []string{"registry.example.com/team/app:v1", reg.host + "/team/app:v1"} {
		if _, err := pullImage(t, s, image, nil); err != nil {
			t.Errorf("%s: %v", image, err)
		}
	}
	named := map[string][]string{"*": {"127.0.0.1:1"}, "registry.example.com": {reg.host}}
	s, _ = openStore(t, Config{Insecure: []string{reg.host}, Mirrors: named})
	if _, err := pullImage(t, s, "registry.example.com/team/app:v1", nil); err != nil {
		t.Errorf("a mirror of its own: %v", err)
	}
	reg.user, reg.password = "me", "secret"
	s, _ = openStore(t, Config{Insecure: []string{reg.host, "127.0.0.1:1"},
		Mirrors: map[string][]string{"127.0.0.1:1": {reg.host}}})
	_, err := pullImage(t, s, "127.0.0.1:1/team/app:v1", &cri.AuthConfig{Username: "me", Password: "secret"})
	if !errors.Is(err, agent.ErrImagePull) {
		t.Errorf("a mirror was given the registry's credentials: %v", err)
	}
}

func TestMultiArchitecture(t *testing.T) {
	reg := newRegistry(t)
	ours := newTestImage(t, []entry{{name: "ours", content: "x"}})
	theirs, err := mutate.ConfigFile(ours, &v1.ConfigFile{OS: "linux", Architecture: "s390x"})
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: theirs,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: ours,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: runtime.GOARCH}}})
	r, err := name.ParseReference(reg.host+"/multi:v1", name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(r, index); err != nil {
		t.Fatal(err)
	}
	s, _ := openStore(t, Config{Insecure: []string{reg.host}})
	id, err := pullImage(t, s, reg.host+"/multi:v1", nil)
	if want, _ := ours.ConfigName(); err != nil || id != want.String() {
		t.Errorf("%s, %v", id, err)
	}
}

// newOCIArchive writes images as an OCI archive; damage may modify the folder before.
func newOCIArchive(t *testing.T, images map[string]v1.Image, damage func(dir string)) string {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for n, img := range images {
		if err := p.AppendImage(img, layout.WithAnnotations(map[string]string{nameAnnotation: n})); err != nil {
			t.Fatal(err)
		}
	}
	if damage != nil {
		damage(dir)
	}
	file := filepath.Join(t.TempDir(), "images.tar")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestArchives(t *testing.T) {
	img := newTestImage(t, []entry{{name: "f", content: "x"}}, []entry{{name: "g", content: "y"}})
	oci := newOCIArchive(t, map[string]v1.Image{"keelson.dev/a:v1": img, "short": img}, nil)
	docker := filepath.Join(t.TempDir(), "docker.tar")
	tag, err := name.NewTag("example.com/docker:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(docker, tag, newTestImage(t, []entry{{name: "d", content: "docker"}})); err != nil {
		t.Fatal(err)
	}
	zipped := filepath.Join(t.TempDir(), "docker.tar.gz")
	plain, err := os.ReadFile(docker)
	if err != nil {
		t.Fatal(err)
	}
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	_, _ = zw.Write(plain)
	zw.Close()
	if err := os.WriteFile(zipped, z.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _ := openStore(t, Config{})
	for file, want := range map[string]string{oci: "docker.io/library/short:latest", docker: "example.com/docker:v1",
		zipped: "example.com/docker:v1"} {
		names, err := s.Import(testContext(t), file)
		if err != nil || !slices.Contains(names, want) {
			t.Errorf("%s: %v, %v; want %s", file, names, err, want)
		}
		if st, err := s.ImageStatus(testContext(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: want}}); err !=
			nil || st.Image == nil {
			t.Errorf("status of %s: %v, %v", want, st, err)
		}
	}
	// The archives folder has one invalid file among valid ones.
	folder := t.TempDir()
	for _, f := range []string{oci, docker} {
		if err := os.Symlink(f, filepath.Join(folder, filepath.Base(f))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "aa-bad.tar"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for range 2 {
		s2, stop := openStore(t, Config{Root: root, Archives: folder})
		list, err := s2.ListImages(testContext(t), &cri.ListImagesRequest{})
		if err != nil || len(list.Images) != 2 {
			t.Errorf("from the folder: %v, %v", list, err)
		}
		stop()
	}
}

func TestBadArchivesSayWhy(t *testing.T) {
	img := newTestImage(t, []entry{{name: "f", content: strings.Repeat("x", 5000)}})
	layers, _ := img.Layers()
	digest, _ := layers[0].Digest()
	config, _ := img.ConfigName()
	damageFile := func(hex string) func(string) {
		return func(dir string) {
			file := filepath.Join(dir, "blobs/sha256", hex)
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			b[len(b)/2] ^= 1
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	other := newTestImage(t, []entry{{name: "../evil", content: "x"}})
	foreign, err := mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: "s390x"})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := openStore(t, Config{})
	for what, c := range map[string]struct{ file, want string }{
		"layer damaged": {newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, damageFile(digest.Hex)),
			"layer 1 of 1 (" + digest.String()},
		"config damaged": {newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, damageFile(config.Hex)),
			"config is sha256:"},
		"layer missing": {newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, func(dir string) {
			if err := os.Remove(filepath.Join(dir, "blobs/sha256", digest.Hex)); err != nil {
				t.Fatal(err)
			}
		}), "no such file"},
		"escaping path": {newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": other}, nil),
			"path leads outside the image"},
		"architecture": {newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": foreign}, nil), "s390x"},
	} {
		_, err := s.Import(testContext(t), c.file)
		if !errors.Is(err, agent.ErrImageUnpack) || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), "x.dev/a:v1") {
			t.Errorf("%s: %v; want %q", what, err, c.want)
		}
	}
	if e, err := os.ReadDir(s.storePath("layers")); err != nil || len(e) != 0 {
		t.Errorf("layers of bad images: %v, %v", e, err)
	}
	if e, err := os.ReadDir(s.storePath("images")); err != nil || len(e) != 0 {
		t.Errorf("bad images: %v, %v", e, err)
	}
}

func TestRootFS(t *testing.T) {
	img := newTestImage(t, []entry{{name: "a", content: "low"}, {name: "gone", content: "x"},
		{name: "d/old", content: "x"}},
		[]entry{{name: "a", content: "high"}, {name: ".wh.gone"}, {name: "d/.wh..wh..opq"},
			{name: "d/new", content: "y"}})
	s, stop := openStore(t, Config{})
	if _, err := s.Import(testContext(t), newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/none:v1"); !errors.Is(err, agent.ErrImageNotPresent) {
		t.Errorf("missing image: %v", err)
	}
	fs, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/a:v1")
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/a:v1")
	if err != nil || again.Path != fs.Path || !slices.Equal(again.Lower, fs.Lower) {
		t.Errorf("again: %+v, %v", again, err)
	}
	if err := unix.Mount("overlay", fs.Path, "overlay", 0,
		"lowerdir="+strings.Join(fs.Lower, ":")+",upperdir="+fs.Upper+",workdir="+fs.Work); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(fs.Path, unix.MNT_DETACH)
	if b, err := os.ReadFile(fs.Path + "/a"); err != nil || string(b) != "high" {
		t.Errorf("a: %q, %v", b, err)
	}
	for _, gone := range []string{"gone", "d/old"} {
		if _, err := os.Stat(fs.Path + "/" + gone); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there (%v)", gone, err)
		}
	}
	for _, there := range []string{"d/new", "proc", "etc/hosts"} {
		if _, err := os.Stat(fs.Path + "/" + there); err != nil {
			t.Error(err)
		}
	}
	// The image may be removed. The layers of a container stay, also across a restart.
	if _, err := s.RemoveImage(testContext(t),
		&cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "x.dev/a:v1"}}); err != nil {
		t.Fatal(err)
	}
	stop()
	s, _ = openStore(t, Config{Root: s.cfg.Root})
	if _, err := s.Config(testContext(t), "x.dev/a:v1"); !errors.Is(err, agent.ErrImageNotPresent) {
		t.Errorf("removed image: %v", err)
	}
	if _, err := os.Stat(fs.Lower[0] + "/a"); err != nil {
		t.Errorf("a layer in use was removed: %v", err)
	}
	for range 2 {
		if err := s.RemoveRootFS(testContext(t), "c1"); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"layers", "containers"} {
		if e, err := os.ReadDir(s.storePath(d)); err != nil || len(e) != 0 {
			t.Errorf("%s after all is removed: %v, %v", d, e, err)
		}
	}
	for _, bad := range []string{"", "../x", ".hidden", "a/b"} {
		if _, err := s.PrepareRootFS(testContext(t), bad, "x.dev/a:v1"); err == nil {
			t.Errorf("container id %q was accepted", bad)
		}
	}
}

func TestReferences(t *testing.T) {
	const d = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for in, want := range map[string]string{
		"busybox": "docker.io/library/busybox:latest", "a/b": "docker.io/a/b:latest",
		"index.docker.io/a/b:v1": "docker.io/a/b:v1",
		"ghcr.io/x/y:z":          "ghcr.io/x/y:z", "localhost:5000/a": "localhost:5000/a:latest",
		"a@" + d:    "docker.io/library/a@" + d,
		"a:v1@" + d: "docker.io/library/a@" + d,
	} {
		r, err := parseReference(in)
		if err != nil || r.String() != want {
			t.Errorf("%s: %s, %v; want %s", in, r, err, want)
		}
	}
	for _, bad := range []string{"", "A", "a b", "a:", "http://x/y", "a@sha256:12"} {
		if r, err := parseReference(bad); !errors.Is(err, agent.ErrInvalidImage) {
			t.Errorf("%q: %s, %v", bad, r, err)
		}
	}
}

// A container and its root file system do not survive a reboot. Across a restart of the agent they
// stay, with all written data.
func TestRootFSAndReboot(t *testing.T) {
	run := t.TempDir()
	s, stop := openStore(t, Config{Root: t.TempDir(), Run: run})
	img := newTestImage(t, []entry{{name: "a", content: "low"}})
	if _, err := s.Import(testContext(t), newOCIArchive(t, map[string]v1.Image{"x.dev/a:v1": img}, nil)); err != nil {
		t.Fatal(err)
	}
	fs, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/a:v1")
	if err == nil {
		err = os.WriteFile(fs.Upper+"/written", nil, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	stop()
	s, stop = openStore(t, Config{Root: s.cfg.Root, Run: run})
	if again, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/a:v1"); err != nil || again.Upper != fs.Upper {
		t.Errorf("after a restart: %+v, %v", again, err)
	}
	if _, err := os.Stat(fs.Upper + "/written"); err != nil {
		t.Error(err)
	}
	stop()
	if err := os.RemoveAll(run); err != nil { // simulates a reboot
		t.Fatal(err)
	}
	s, _ = openStore(t, Config{Root: s.cfg.Root, Run: run})
	if _, err := s.ListImages(testContext(t), &cri.ListImagesRequest{}); err != nil { // waits until the store is loaded
		t.Fatal(err)
	}
	if e, err := os.ReadDir(s.storePath("containers")); err != nil || len(e) != 0 {
		t.Errorf("after a reboot: %v, %v", e, err)
	}
	if _, err := s.PrepareRootFS(testContext(t), "c1", "x.dev/a:v1"); err != nil {
		t.Errorf("a container of that name after a reboot: %v", err)
	}
}
