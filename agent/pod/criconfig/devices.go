package criconfig

import (
	"fmt"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// ClaimedDevices returns the CDI devices of the resource claims that a container references, each
// device once. If a reference names one request of a claim, only the devices of that request and of
// its subrequests are returned.
func ClaimedDevices(spec *v1.Container, claimed agent.ClaimedDevices) []*cri.CDIDevice {
	var out []*cri.CDIDevice
	seen := map[string]bool{}
	for _, use := range spec.Resources.Claims {
		for _, d := range claimed[use.Name] {
			if !d.MatchesRequest(use.Request) {
				continue
			}
			for _, name := range d.CDI {
				if !seen[name] {
					seen[name] = true
					out = append(out, &cri.CDIDevice{Name: name})
				}
			}
		}
	}
	return out
}

// blockDevices returns the volumes that a container uses as block devices. A read-only volume
// permits reading and mknod only.
func blockDevices(spec *v1.Container, volumes map[string]agent.Mount) ([]*cri.Device, error) {
	var out []*cri.Device
	for _, d := range spec.VolumeDevices {
		v, ok := volumes[d.Name]
		if !ok {
			return nil, fmt.Errorf("cannot find volume %q to pass into container %q", d.Name, spec.Name)
		}
		if !v.Block {
			return nil, fmt.Errorf(
				"volume %q of container %q is not a block device: use volumeMounts instead of volumeDevices",
				d.Name, spec.Name)
		}
		access := "rwm"
		if v.ReadOnly {
			access = "rm"
		}
		out = append(out, &cri.Device{ContainerPath: path.Join("/", d.DevicePath), HostPath: v.HostPath,
			Permissions: access})
	}
	return out, nil
}

// AddPluginDevices adds the variables, mounts, devices and annotations of allocated devices to a
// container. The pod's own variables and mounts take precedence, as in the kubelet. Annotations
// that the agent reads cannot be overridden.
func AddPluginDevices(config *cri.ContainerConfig, devices agent.PluginDevices) {
	config.Envs = slices.Concat(devices.Envs, config.Envs)
	config.Mounts = slices.Concat(devices.Mounts, config.Mounts)
	config.Devices = append(config.Devices, devices.Devices...)
	for _, d := range devices.CDI {
		if !slices.ContainsFunc(config.CDIDevices, func(o *cri.CDIDevice) bool { return o.Name == d.Name }) {
			config.CDIDevices = append(config.CDIDevices, d)
		}
	}
	for k, v := range devices.Annotations {
		if _, own := config.Annotations[k]; !own && !strings.HasPrefix(k, "keelson.dev/") &&
			!strings.HasPrefix(k, "io.kubernetes.") {
			config.Annotations[k] = v
		}
	}
}
