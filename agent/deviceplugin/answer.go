package deviceplugin

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"keelson.dev/keelson/agent"
)

// containerSettings are the settings of a container from an Allocate response, as the pod's record
// stores them.
type containerSettings struct {
	Envs        map[string]string `json:"envs,omitempty"`
	Mounts      []mount           `json:"mounts,omitempty"`
	Devices     []device          `json:"devices,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	CDI         []string          `json:"cdi,omitempty"`
}

type mount struct {
	Container string `json:"container"`
	Host      string `json:"host"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
}

type device struct {
	Container   string `json:"container"`
	Host        string `json:"host"`
	Permissions string `json:"permissions"`
}

// parseAllocation validates a plugin's Allocate response for one container and returns its
// settings.
func parseAllocation(res *api.AllocateResponse) (a containerSettings, err error) {
	if n := len(res.GetContainerResponses()); n != 1 {
		return a, fmt.Errorf("responses for %d containers, and one was requested", n)
	}
	c := res.ContainerResponses[0]
	for what, n := range map[string]int{"variables": len(c.Envs), "mounts": len(c.Mounts), "devices": len(c.Devices),
		"annotations": len(c.Annotations),
		"CDI devices": len(c.CdiDevices)} {
		if n > maxSettings {
			return a, fmt.Errorf("%d %s: %d at most", n, what, maxSettings)
		}
	}
	a.Envs, a.Annotations = c.Envs, c.Annotations
	for k, v := range c.Envs {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return a, fmt.Errorf("%q is not a valid environment variable", truncateText(k))
		}
	}
	for _, d := range c.Mounts {
		if err := checkAbsolute(d.ContainerPath, d.HostPath); err != nil {
			return a, fmt.Errorf("a mount: %w", err)
		}
		a.Mounts = append(a.Mounts, mount{Container: d.ContainerPath, Host: d.HostPath, ReadOnly: d.ReadOnly})
	}
	for _, d := range c.Devices {
		if err := checkAbsolute(d.ContainerPath, d.HostPath); err != nil {
			return a, fmt.Errorf("a device: %w", err)
		}
		if strings.Trim(d.Permissions, "rwm") != "" || len(d.Permissions) > 3 {
			return a, fmt.Errorf("device %s has the permissions %q: want a combination of r, w and m",
				truncateText(d.HostPath), truncateText(d.Permissions))
		}
		a.Devices = append(a.Devices, device{Container: d.ContainerPath, Host: d.HostPath, Permissions: d.Permissions})
	}
	for _, d := range c.CdiDevices {
		if _, _, _, err := parser.ParseQualifiedName(d.GetName()); err != nil || len(d.GetName()) > maxID {
			return a, fmt.Errorf("%q is not a CDI device name: want vendor/class=name", truncateText(d.GetName()))
		}
		a.CDI = append(a.CDI, d.GetName())
	}
	return a, nil
}

func checkAbsolute(paths ...string) error {
	for _, p := range paths {
		if !filepath.IsAbs(p) || len(p) > maxText || strings.Contains(p, "\x00") {
			return fmt.Errorf("%q is not an absolute path", truncateText(p))
		}
	}
	return nil
}

// addTo adds the settings of one resource to out, the settings of a container. If two plugins set
// the same variable, path or annotation, the first one takes effect. Callers therefore add
// resources in a fixed order. seen contains the variables, paths and annotations that are already
// set.
func (a *containerSettings) addTo(out *agent.PluginDevices, seen map[string]bool) {
	first := func(kind, name string) bool {
		key := kind + "\x00" + name
		was := seen[key]
		seen[key] = true
		return !was
	}
	for _, k := range slices.Sorted(maps.Keys(a.Envs)) {
		if first("env", k) {
			out.Envs = append(out.Envs, &cri.KeyValue{Key: k, Value: []byte(a.Envs[k])})
		}
	}
	for _, d := range a.Mounts {
		if first("path", filepath.Clean(d.Container)) {
			out.Mounts = append(out.Mounts, &cri.Mount{ContainerPath: d.Container, HostPath: d.Host,
				Readonly: d.ReadOnly})
		}
	}
	for _, d := range a.Devices {
		if first("path", filepath.Clean(d.Container)) {
			out.Devices = append(out.Devices, &cri.Device{ContainerPath: d.Container, HostPath: d.Host,
				Permissions: d.Permissions})
		}
	}
	for _, name := range a.CDI {
		if first("cdi", name) {
			out.CDI = append(out.CDI, &cri.CDIDevice{Name: name})
		}
	}
	for k, v := range a.Annotations {
		if first("annotation", k) {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[k] = v
		}
	}
}

// errPluginMissing is returned if the device plugin of a resource is not connected.
var errPluginMissing = errors.New("its device plugin is not connected")
