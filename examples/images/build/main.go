// Command build makes the example images, and that of the proxy in front of Services, as OCI archives:
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
)

func main() {
	out := flag.String("out", "bin/images", "folder for the archives")
	busybox := flag.String("busybox", "/bin/busybox", "a static busybox (Debian: busybox-static)")
	entry := flag.String("entry", "", "the program keelson-entry")
	version := flag.String("version", "dev", "the release whose proxies these are: their image's tag")
	only := flag.Bool("only-entry", false, "make that of the proxies alone")
	flag.StringVar(&arch, "arch", runtime.GOARCH, "architecture of -entry, where that is made alone")
	flag.Parse()
	if *only && *entry == "" || !*only && arch != runtime.GOARCH {
		fmt.Fprintln(os.Stderr, "build: -only-entry needs -entry, and another architecture needs -only-entry")
		os.Exit(2)
	}
	if *only {
		if err := errors.Join(os.MkdirAll(*out, 0o755), writeEntry(*out, *entry, *version)); err != nil {
			fmt.Fprintln(os.Stderr, "build:", err)
			os.Exit(1)
		}
		return
	}
	if err := build(*out, *busybox, *entry, *version); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

// arch is the architecture of the images.
var arch = runtime.GOARCH

func build(out, busybox, entry, version string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	hello, err := helloLayer()
	if err != nil {
		return fmt.Errorf("build hello: %w", err)
	}
	images := map[string]v1.Image{}
	for _, v := range []string{"v1", "v2"} {
		images["keelson.dev/hello:"+v], err = image(hello, v1.Config{
			Entrypoint: []string{"/hello"}, Env: []string{"PATH=/", "HELLO_VERSION=" + v},
			ExposedPorts: map[string]struct{}{"8080/tcp": {}}})
		if err != nil {
			return err
		}
	}
	if err := writeArchive(filepath.Join(out, "hello.tar"), images); err != nil {
		return err
	}
	tools, err := toolsLayer(busybox)
	if err != nil {
		return fmt.Errorf("build tools: %w", err)
	}
	img, err := image(tools, v1.Config{Cmd: []string{"sh"}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin:/sbin"}, WorkingDir: "/"})
	if err != nil {
		return err
	}
	if err := writeArchive(filepath.Join(out, "tools.tar"), map[string]v1.Image{"keelson.dev/tools:v1": img}); err != nil || entry == "" {
		return err
	}
	return writeEntry(out, entry, version)
}

func writeEntry(out, entry, version string) error {
	img, err := entryImage(entry)
	if err != nil {
		return fmt.Errorf("build entry: %w", err)
	}
	return writeArchive(filepath.Join(out, "entry.tar"), map[string]v1.Image{"keelson.dev/entry:" + version: img, "keelson.dev/entry:dev": img})
}

func entryImage(program string) (v1.Image, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	l := newLayer()
	l.accounts()
	l.file("keelson-entry", 0o755, content)
	layer, err := l.close()
	if err != nil {
		return nil, err
	}
	return image(layer, v1.Config{Entrypoint: []string{"/keelson-entry"}, User: "65534:65534"})
}

// layerTar collects the files of a layer.
type layerTar struct {
	buf bytes.Buffer
	w   *tar.Writer
	err error
}

func newLayer() *layerTar {
	l := &layerTar{}
	l.w = tar.NewWriter(&l.buf)
	return l
}

func (l *layerTar) add(h *tar.Header, content []byte) {
	if l.err != nil {
		return
	}
	h.Size, h.ModTime, h.Format = int64(len(content)), time.Unix(0, 0), tar.FormatPAX
	if l.err = l.w.WriteHeader(h); l.err == nil {
		_, l.err = l.w.Write(content)
	}
}

func (l *layerTar) dir(name string, mode int64) {
	l.add(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}, nil)
}

func (l *layerTar) file(name string, mode int64, content []byte) {
	l.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (l *layerTar) link(name, target string) {
	l.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (l *layerTar) close() (v1.Layer, error) {
	if l.err == nil {
		l.err = l.w.Close()
	}
	if l.err != nil {
		return nil, l.err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(l.buf.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer))
}

// accounts are the users of both images.
func (l *layerTar) accounts() {
	l.dir("etc", 0o755)
	l.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\napp:x:1000:1000:app:/tmp:/bin/sh\n"))
	l.file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\napp:x:1000:\nextra:x:2000:app\n"))
	l.dir("tmp", 0o1777)
}

func helloLayer() (v1.Layer, error) {
	content, err := program("hello")
	if err != nil {
		return nil, err
	}
	l := newLayer()
	l.accounts()
	l.file("hello", 0o755, content)
	return l.close()
}

// program builds a program of examples/images.
func program(name string) ([]byte, error) {
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

func toolsLayer(busybox string) (v1.Layer, error) {
	content, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w (Debian: apt-get install busybox-static)", err)
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of %s: %w", busybox, err)
	}
	wget, err := program("wget")
	if err != nil {
		return nil, fmt.Errorf("build wget: %w", err)
	}
	l := newLayer()
	l.accounts()
	l.dir("root", 0o700)
	l.dir("bin", 0o755)
	l.file("bin/busybox", 0o755, content)
	l.file("bin/wget", 0o755, wget)
	applets := strings.Fields(string(list))
	slices.Sort(applets)
	for _, a := range slices.Compact(applets) {
		if a != "busybox" && a != "wget" && !strings.Contains(a, "/") {
			l.link("bin/"+a, "busybox")
		}
	}
	for _, d := range []string{"usr", "usr/bin", "usr/local", "usr/local/bin", "var", "var/run", "home"} {
		l.dir(d, 0o755)
	}
	return l.close()
}

func image(layer v1.Layer, config v1.Config) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: arch, Config: config, RootFS: rootFS(img)})
}

func rootFS(img v1.Image) v1.RootFS {
	c, err := img.ConfigFile()
	if err != nil {
		return v1.RootFS{Type: "layers"}
	}
	return c.RootFS
}

// writeArchive writes images as one OCI archive, with names as annotations of the
// index.
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
	return tarFolder(file, dir)
}

func tarFolder(file, dir string) error {
	out, err := os.Create(file + ".new")
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
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if e := out.Close(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}
