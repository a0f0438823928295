package pod

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/agent"
)

// grant is the set of resources that the node has allocated to the containers of a pod. The spec
// may ask for other resources after a resize, possibly more than the node has. Containers are
// created with the granted resources, and only a new grant changes them.
//
// It is stored in the pod's directory, so that a restarted agent knows its grants. Fields may be
// added but never change their meaning; unknown fields are ignored.
type grant struct {
	Version    int                                `json:"version"`
	Generation int64                              `json:"generation"` // generation of the pod for which it was granted
	Containers map[string]v1.ResourceRequirements `json:"containers"`
	Settled    bool                               `json:"settled"` // the grant is fully in effect
}

const (
	grantVersion = 1
	grantFile    = "granted.json"
	grantLimit   = 1 << 20 // largest file that is read, in bytes
)

// grantOf returns a grant of the resources in the pod's spec.
func grantOf(pod *v1.Pod) grant {
	g := grant{Version: grantVersion, Generation: pod.Generation, Containers: map[string]v1.ResourceRequirements{}, Settled: true}
	eachContainer(pod, func(c *v1.Container) {
		g.Containers[c.Name] = v1.ResourceRequirements{Requests: c.Resources.Requests, Limits: c.Resources.Limits}
	})
	return g
}

// eachContainer calls f for the init containers and the containers of a pod, in spec order.
func eachContainer(pod *v1.Pod, f func(*v1.Container)) {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			f(&list[i])
		}
	}
}

// covers reports whether the resources in the pod's spec equal the grant.
func (g grant) covers(pod *v1.Pod) bool {
	same := true
	eachContainer(pod, func(c *v1.Container) {
		if have, ok := g.Containers[c.Name]; ok && !sameResources(have, c.Resources) {
			same = false
		}
	})
	return same
}

func sameResources(a, b v1.ResourceRequirements) bool {
	return equality.Semantic.DeepEqual(a.Requests, b.Requests) && equality.Semantic.DeepEqual(a.Limits, b.Limits)
}

// of returns the pod with the granted resources in place of the requested ones.
func (g grant) of(pod *v1.Pod) *v1.Pod {
	if g.covers(pod) {
		return pod
	}
	out := *pod
	replace := func(list []v1.Container) []v1.Container {
		next := make([]v1.Container, len(list))
		copy(next, list)
		for i := range next {
			if have, ok := g.Containers[next[i].Name]; ok {
				next[i].Resources.Requests, next[i].Resources.Limits = have.Requests, have.Limits
			}
		}
		return next
	}
	out.Spec.InitContainers, out.Spec.Containers = replace(pod.Spec.InitContainers), replace(pod.Spec.Containers)
	return &out
}

// loadGrant reads the grant that an earlier agent process stored. If there is no file, found is
// false and the grant equals the spec: an older release stored no grants.
func loadGrant(p agent.Paths, pod *v1.Pod) (g grant, found bool, err error) {
	file := filepath.Join(directory(p, pod.UID), grantFile)
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return grantOf(pod), false, nil
	}
	if err != nil {
		return grantOf(pod), false, fmt.Errorf("reading what pod %s/%s was granted: %w", pod.Namespace, pod.Name, err)
	}
	defer f.Close()
	if st, serr := f.Stat(); serr != nil || st.Size() > grantLimit {
		return grantOf(pod), false, fmt.Errorf("reading %s: more than %d bytes (%v)", file, grantLimit, serr)
	}
	if err := json.NewDecoder(f).Decode(&g); err != nil {
		return grantOf(pod), false, fmt.Errorf("reading %s: %w", file, err)
	}
	return g, true, nil
}

// saveGrant replaces the stored grant atomically.
func saveGrant(p agent.Paths, pod *v1.Pod, g grant) error {
	g.Version = grantVersion
	data, err := json.Marshal(g)
	if err != nil {
		return err
	}
	dir := directory(p, pod.UID)
	file := filepath.Join(dir, grantFile)
	if err = os.MkdirAll(dir, 0o750); err == nil {
		if err = os.WriteFile(file+".new", data, 0o600); err == nil {
			err = os.Rename(file+".new", file)
		}
	}
	if err != nil {
		return fmt.Errorf("recording what pod %s/%s is granted: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}
