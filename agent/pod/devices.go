package pod

import (
	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// devicesOf are the devices that a container sees: those of the claims that it names, or of one request of a claim, with
// the alternative that was chosen for it. Each is named once.
func devicesOf(spec *v1.Container, all agent.ClaimedDevices) []*cri.CDIDevice {
	var out []*cri.CDIDevice
	seen := map[string]bool{}
	for _, use := range spec.Resources.Claims {
		for _, d := range all[use.Name] {
			if !d.For(use.Request) {
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
