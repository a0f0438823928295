package lab

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// registryAt serves the registry's handler over a folder, as ServeRegistry does.
func registryAt(t *testing.T, folder string) (host string) {
	t.Helper()
	store := manifestStore(filepath.Join(folder, "manifests"))
	for _, dir := range []string{string(store), blobFolder(folder)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)),
		registry.WithBlobHandler(registry.NewDiskBlobHandler(blobFolder(folder))))
	if err := store.loadManifests(images); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(store.persistManifests(images))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// Images and indexes are there again after a restart; one that was removed is not.
func TestRegistryOutlivesItsProcess(t *testing.T) {
	folder := t.TempDir()
	index := must[v1.ImageIndex](t)(random.Index(1000, 2, 2))
	img := must[v1.Image](t)(random.Image(1000, 1))
	before := registryAt(t, folder)
	ref := func(host, path string) name.Reference {
		return must[name.Reference](t)(name.ParseReference(host+"/"+path, name.Insecure))
	}
	if err := errors.Join(remote.WriteIndex(ref(before, "multi:v1"), index), remote.Write(ref(before, "app:v1"), img),
		remote.Write(ref(before, "gone:v1"), img), remote.Delete(ref(before, "gone:v1"))); err != nil {
		t.Fatal(err)
	}
	after := registryAt(t, folder)
	got := must[v1.Image](t)(remote.Image(ref(after, "app:v1")))
	if layers := must[[]v1.Layer](t)(got.Layers()); len(layers) != 1 {
		t.Errorf("%d layers", len(layers))
	} else if r, err := layers[0].Compressed(); err != nil {
		t.Error(err)
	} else if _, err := io.Copy(io.Discard, r); err != nil {
		t.Errorf("a layer cannot be read: %v", err)
	}
	want, have := must[v1.Hash](t)(index.Digest()), must[*remote.Descriptor](t)(remote.Get(ref(after, "multi:v1")))
	if have.Digest != want {
		t.Errorf("the index is %s, was %s", have.Digest, want)
	}
	if _, err := remote.Get(ref(after, "gone:v1")); err == nil {
		t.Error("what was removed is there again")
	}
}

// A manifest that is too large is refused, and nothing of it is kept.
func TestRegistryBoundsManifests(t *testing.T) {
	folder := t.TempDir()
	host := registryAt(t, folder)
	body := strings.NewReader(strings.Repeat("x", maxManifest+1))
	q := must[*http.Request](t)(http.NewRequestWithContext(context.Background(), http.MethodPut,
		"http://"+host+"/v2/app/manifests/v1", body))
	resp := must[*http.Response](t)(http.DefaultClient.Do(q))
	resp.Body.Close()
	if left, _ := os.ReadDir(filepath.Join(folder, "manifests")); resp.StatusCode != http.StatusRequestEntityTooLarge ||
		len(left) != 0 {
		t.Errorf("%s, %d manifests", resp.Status, len(left))
	}
}

// Every form in which tools write images is read, and what is none says what is wanted.
func TestOpenArchive(t *testing.T) {
	dir := t.TempDir()
	in := func(file string) string { return filepath.Join(dir, file) }
	img := must[v1.Image](t)(random.Image(100, 2))
	tag := must[name.Tag](t)(name.NewTag("example.com/team/app:v1"))
	if err := tarball.WriteToFile(in("docker.tar"), tag, img); err != nil {
		t.Fatal(err)
	}
	compress(t, in("docker.tar"), in("docker.tar.gz"))
	named := func(n string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img,
			Descriptor: v1.Descriptor{Annotations: map[string]string{"org.opencontainers.image.ref.name": n}}}
	}
	for folder, index := range map[string]v1.ImageIndex{
		"oci":     mutate.AppendManifests(empty.Index, named("example.com/team/app:v1")),
		"short":   mutate.AppendManifests(empty.Index, named("app:v1")),
		"unnamed": mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img}),
	} {
		must[layout.Path](t)(layout.Write(in(folder), index))
	}
	if err := os.WriteFile(in("text"), []byte("no archive at all, but long enough to be looked at"), 0o600); err !=
		nil {
		t.Fatal(err)
	}
	digest := must[v1.Hash](t)(img.Digest())
	for file, want := range map[string]string{
		"docker.tar": "example.com/team/app:v1", "docker.tar.gz": "example.com/team/app:v1",
		"oci": "example.com/team/app:v1", "short": "app:v1",
		"unnamed": "error: an image of the archive has no name", "text": "error: reading archive",
		"absent": "error: stat",
	} {
		found, closeArchive, err := openArchive(in(file))
		if err != nil {
			if got := "error: " + err.Error(); !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s, want %s", file, got, want)
			}
			continue
		}
		if len(found) != 1 || found[0].name.String() != want {
			t.Errorf("%s: %v, want %s", file, found, want)
		} else if file == "oci" && must[v1.Hash](t)(found[0].image.Digest()) != digest {
			t.Errorf("%s: another image", file)
		} else if err := storeImage(in("blobs-"+file), found[0].image); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if err := closeArchive(); err != nil {
			t.Error(err)
		}
	}
}

func compress(t *testing.T, from, to string) {
	t.Helper()
	raw := must[[]byte](t)(os.ReadFile(from))
	out := must[*os.File](t)(os.Create(to))
	z := gzip.NewWriter(out)
	_, err := z.Write(raw)
	if err := errors.Join(err, z.Close(), out.Close()); err != nil {
		t.Fatal(err)
	}
}

// A blob whose bytes have another digest than its name is refused and leaves nothing.
func TestDamagedBlob(t *testing.T) {
	dir := t.TempDir()
	digest, _, err := v1.SHA256(strings.NewReader("good"))
	if err != nil {
		t.Fatal(err)
	}
	bytes := func(s string) func() (io.ReadCloser, error) {
		return func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(s)), nil }
	}
	if err := storeBlob(dir, digest, bytes("bad")); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("bytes of another digest: %v", err)
	}
	if left := must[[]string](t)(filepath.Glob(filepath.Join(dir, "*", "*"))); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := storeBlob(dir, digest, bytes("good")); err != nil {
		t.Error(err)
	}
	if left := must[[]string](t)(filepath.Glob(filepath.Join(dir, "load-*"))); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}
