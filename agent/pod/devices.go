package pod

import (
	"fmt"
	"path"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// devicesOf returns the CDI devices of a container, each once: those of the resource claims that it
// references. A reference may be limited to one request of a claim; this includes the subrequest
// that was allocated for it.
func devicesOf(spec *v1.Container, all agent.ClaimedDevices) []*cri.CDIDevice {
	var out []*cri.CDIDevice
	seen := map[string]bool{}
	for _, use := range spec.Resources.Claims {
		for _, d := range all[use.Name] {
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
			return nil, fmt.Errorf("cannot find volume %q to give to container %q", d.Name, spec.Name)
		}
		if !v.Block {
			return nil, fmt.Errorf("volume %q of container %q is no block device: name it in volumeMounts", d.Name, spec.Name)
		}
		access := "rwm"
		if v.ReadOnly {
			access = "rm"
		}
		out = append(out, &cri.Device{ContainerPath: path.Join("/", d.DevicePath), HostPath: v.HostPath, Permissions: access})
	}
	return out, nil
}
