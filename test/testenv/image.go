package testenv

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1image "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// LoadImage builds an image and loads it into the lab. programs maps a path in the image to a file
// on this machine.
func LoadImage(t testing.TB, tag string, programs map[string]string, entrypoint ...string) {
	t.Helper()
	ref, err := name.NewTag(tag)
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layerOf(programs)
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Config = "linux", runtime.GOARCH, v1image.Config{Entrypoint: entrypoint}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(file, ref, img); err != nil {
		t.Fatal(err)
	}
	Kctl(t, "lab", "load", file)
}

// Build compiles static programs for images. It returns a folder in which each program has the name
// of its package's folder.
func Build(t testing.TB, packages ...string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("go", append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o",
		dir + "/"}, packages...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", strings.Join(packages, ", "), err, out)
	}
	return dir
}

func layerOf(programs map[string]string) (v1image.Layer, error) {
	var layer bytes.Buffer
	tw := tar.NewWriter(&layer)
	for file, from := range programs {
		content, err := os.ReadFile(from)
		if err == nil {
			err = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file, Mode: 0o755, Size: int64(len(content))})
		}
		if err == nil {
			_, err = tw.Write(content)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := tw.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer.Bytes())), nil
	}, tarball.WithCompressedCaching)
}
