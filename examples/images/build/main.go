// Command build writes the example images and the image of the ingress proxy as OCI archives:
//
//	go run ./examples/images/build [-out bin/images] [-busybox /bin/busybox] [-entry bin/keelson-entry] [-version VERSION]
//	go run ./examples/images/build -only-entry -arch arm64 -entry bin/dist/arm64/images/keelson-entry
//
//	hello.tar  keelson.dev/hello:v1 and :v2, the web server of examples/images/hello
//	tools.tar  keelson.dev/tools:v1, busybox with its applets, and the wget of examples/images/wget
//	entry.tar  keelson.dev/entry:VERSION and :dev, the program of cmd/entry; only with -entry
//
// The same sources give the same bytes.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"keelson.dev/keelson/internal/durable"
)

func main() {
	out := flag.String("out", "bin/images", "directory for the archives")
	busybox := flag.String("busybox", "/bin/busybox", "a static busybox (Debian: busybox-static)")
	entry := flag.String("entry", "", "path of the program keelson-entry; empty = no image of the ingress proxy")
	version := flag.String("version", "dev", "version of the release, which is the tag of the ingress proxy's image")
	only := flag.Bool("only-entry", false, "write the archive of the ingress proxy only")
	flag.StringVar(&arch, "arch", runtime.GOARCH, "architecture of the ingress proxy's image with -only-entry")
	flag.Parse()
	if *only && *entry == "" || !*only && arch != runtime.GOARCH {
		fmt.Fprintln(os.Stderr, "build: -only-entry requires -entry, and -arch requires -only-entry")
		os.Exit(2)
	}
	if *only {
		if err := errors.Join(os.MkdirAll(*out, 0o755), writeEntry(*out, *entry, *version)); err != nil {
			fmt.Fprintln(os.Stderr, "build:", err)
			os.Exit(1)
		}
		return
	}
	if err := buildImages(*out, *busybox, *entry, *version); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

// arch is the architecture of the images.
var arch = runtime.GOARCH

func buildImages(out, busybox, entry, version string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	hello, err := buildHelloLayer()
	if err != nil {
		return fmt.Errorf("build hello: %w", err)
	}
	images := map[string]v1.Image{}
	for _, v := range []string{"v1", "v2"} {
		images["keelson.dev/hello:"+v], err = newImage(hello, v1.Config{
			Entrypoint: []string{"/hello"}, Env: []string{"PATH=/", "HELLO_VERSION=" + v},
			ExposedPorts: map[string]struct{}{"8080/tcp": {}}})
		if err != nil {
			return err
		}
	}
	if err := writeArchive(filepath.Join(out, "hello.tar"), images); err != nil {
		return err
	}
	tools, err := buildToolsLayer(busybox)
	if err != nil {
		return fmt.Errorf("build tools: %w", err)
	}
	img, err := newImage(tools, v1.Config{Cmd: []string{"sh"}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin:/sbin"},
		WorkingDir: "/"})
	if err != nil {
		return err
	}
	if err := writeArchive(filepath.Join(out, "tools.tar"), map[string]v1.Image{"keelson.dev/tools:v1": img}); err !=
		nil || entry == "" {
		return err
	}
	return writeEntry(out, entry, version)
}

func writeEntry(out, entry, version string) error {
	img, err := buildEntryImage(entry)
	if err != nil {
		return fmt.Errorf("build entry: %w", err)
	}
	return writeArchive(filepath.Join(out, "entry.tar"),
		map[string]v1.Image{"keelson.dev/entry:" + version: img, "keelson.dev/entry:dev": img})
}

func buildEntryImage(buildProgram string) (v1.Image, error) {
	content, err := os.ReadFile(buildProgram)
	if err != nil {
		return nil, err
	}
	l := newLayerBuilder()
	l.addAccountFiles()
	l.addFile("keelson-entry", 0o755, content)
	layer, err := l.buildLayer()
	if err != nil {
		return nil, err
	}
	return newImage(layer, v1.Config{Entrypoint: []string{"/keelson-entry"}, User: "65534:65534"})
}

// layerBuilder collects the files of an image layer.
type layerBuilder struct {
	buf bytes.Buffer
	w   *tar.Writer
	err error
}

func newLayerBuilder() *layerBuilder {
	l := &layerBuilder{}
	l.w = tar.NewWriter(&l.buf)
	return l
}

func (l *layerBuilder) addEntry(h *tar.Header, content []byte) {
	if l.err != nil {
		return
	}
	h.Size, h.ModTime, h.Format = int64(len(content)), time.Unix(0, 0), tar.FormatPAX
	if l.err = l.w.WriteHeader(h); l.err == nil {
		_, l.err = l.w.Write(content)
	}
}

func (l *layerBuilder) addDirectory(name string, mode int64) {
	l.addEntry(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}, nil)
}

func (l *layerBuilder) addFile(name string, mode int64, content []byte) {
	l.addEntry(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (l *layerBuilder) addSymlink(name, target string) {
	l.addEntry(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (l *layerBuilder) buildLayer() (v1.Layer, error) {
	if l.err == nil {
		l.err = l.w.Close()
	}
	if l.err != nil {
		return nil, l.err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(l.buf.Bytes())), nil
	},
		tarball.WithMediaType(types.OCILayer))
}

// addAccountFiles adds the user and group files of both images.
func (l *layerBuilder) addAccountFiles() {
	l.addDirectory("etc", 0o755)
	l.addFile("etc/passwd", 0o644,
		[]byte(
			"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\napp:x:1000:1000:app:/tmp:/bin/sh\n"))
	l.addFile("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\napp:x:1000:\nextra:x:2000:app\n"))
	l.addDirectory("tmp", 0o1777)
}

func buildHelloLayer() (v1.Layer, error) {
	content, err := buildProgram("hello")
	if err != nil {
		return nil, err
	}
	l := newLayerBuilder()
	l.addAccountFiles()
	l.addFile("hello", 0o755, content)
	return l.buildLayer()
}

// buildProgram builds a program of examples/images and returns its content.
func buildProgram(name string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "keelson-image-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, name)
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", bin,
		"keelson.dev/keelson/examples/images/"+name)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, text)
	}
	return os.ReadFile(bin)
}

func buildToolsLayer(busybox string) (v1.Layer, error) {
	content, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w (Debian: apt-get install busybox-static)", err)
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of %s: %w", busybox, err)
	}
	wget, err := buildProgram("wget")
	if err != nil {
		return nil, fmt.Errorf("build wget: %w", err)
	}
	l := newLayerBuilder()
	l.addAccountFiles()
	l.addDirectory("root", 0o700)
	l.addDirectory("bin", 0o755)
	l.addFile("bin/busybox", 0o755, content)
	l.addFile("bin/wget", 0o755, wget)
	applets := strings.Fields(string(list))
	slices.Sort(applets)
	for _, a := range slices.Compact(applets) {
		if a != "busybox" && a != "wget" && !strings.Contains(a, "/") {
			l.addSymlink("bin/"+a, "busybox")
		}
	}
	for _, d := range []string{"usr", "usr/bin", "usr/local", "usr/local/bin", "var", "var/run", "home"} {
		l.addDirectory(d, 0o755)
	}
	return l.buildLayer()
}

func newImage(layer v1.Layer, config v1.Config) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: arch, Config: config,
		RootFS: rootFSOf(img)})
}

func rootFSOf(img v1.Image) v1.RootFS {
	c, err := img.ConfigFile()
	if err != nil {
		return v1.RootFS{Type: "layers"}
	}
	return c.RootFS
}

// writeArchive writes images to one OCI archive. The index of the archive has their names as
// annotations.
func writeArchive(file string, images map[string]v1.Image) error {
	dir, err := os.MkdirTemp("", "keelson-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	index, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	var names []string
	for n := range images {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		err := index.AppendImage(images[n], layout.WithAnnotations(map[string]string{
			"io.containerd.image.name": n, "org.opencontainers.image.ref.name": n[strings.LastIndex(n, ":")+1:]}),
			layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch}))
		if err != nil {
			return err
		}
	}
	return writeTar(file, dir)
}

func writeTar(file, dir string) error {
	out, err := durable.Create(file, durable.Options{Level: durable.Atomic, Mode: 0o666})
	if err != nil {
		return err
	}
	w := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)),
			ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return errors.Join(err, out.Discard())
	}
	return out.Commit()
}
