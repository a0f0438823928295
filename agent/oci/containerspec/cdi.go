package containerspec

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// DefaultCDIDirs are the directories with CDI specifications, in which drivers and administrators
// describe devices. If a device is described twice, the later directory takes precedence.
var DefaultCDIDirs = []string{"/etc/cdi", "/var/run/cdi"}

// Limits of the CDI specifications in one directory.
const (
	maxCDIFiles = 1024
	maxCDIBytes = 8 << 20
)

// addCDI applies the CDI devices of the request to the container's spec. It reads the CDI
// specifications each time, because drivers write them while they prepare devices.
func (in *Input) addCDI(spec *specs.Spec) error {
	var names []string
	for _, d := range in.Config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	// Older device plugins name CDI devices in container annotations with the prefix cdi.k8s.io.
	_, devices, err := cdi.ParseAnnotations(in.Config.GetAnnotations())
	if err != nil {
		return fmt.Errorf("devices in annotations: %w", err)
	}
	for _, name := range devices {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	for _, dir := range in.Dirs.CDI {
		if err := checkCDIDir(dir); err != nil {
			return fmt.Errorf("devices %s: %w", strings.Join(names, ", "), err)
		}
	}
	cache, err := cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(in.Dirs.CDI...))
	if err != nil {
		return fmt.Errorf("devices %s: reading CDI specifications: %w", strings.Join(names, ", "), err)
	}
	if _, err := cache.InjectDevices(spec, names...); err != nil {
		return fmt.Errorf("devices %s: CDI specifications in %s: %w", strings.Join(names, ", "),
			strings.Join(in.Dirs.CDI, " and "), err)
	}
	return nil
}

// checkCDIDir returns an error if a directory has too many CDI specifications, or if one of them is
// too large.
func checkCDIDir(dir string) error {
	files, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading CDI specifications: %w", err)
	}
	var bytes int64
	count := 0
	for _, f := range files {
		if ext := filepath.Ext(f.Name()); ext != ".json" && ext != ".yaml" {
			continue
		}
		count++
		if info, err := os.Stat(filepath.Join(dir, f.Name())); err == nil {
			bytes += info.Size()
		}
	}
	if count > maxCDIFiles || bytes > maxCDIBytes {
		return fmt.Errorf(
			"CDI specifications in %s: %d files with %d bytes exceed the limit of %d files and %d bytes: remove "+
				"specifications that no device needs",
			dir, count, bytes, maxCDIFiles, maxCDIBytes)
	}
	return nil
}
