package volume

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/keylock"
)

// projectedFile is a file of a projected volume.
type projectedFile struct {
	data []byte
	mode int32
	uid  *int64
}

// payload is the content of a projected volume: its files by path relative to the volume.
type payload map[string]projectedFile

// fileVolumes writes configMap, secret, downwardAPI and projected volumes.
type fileVolumes struct {
	*layout
	locks keylock.Locks // by folder of a volume
	mu    sync.Mutex
	tmpfs bool // RUN/secrets is mounted
}

// writeFiles writes the files of a configMap, secret, projected or downwardAPI volume, if they have
// changed, and returns its mount.
func (v *fileVolumes) writeFiles(ctx context.Context, pod *v1.Pod, vol *v1.Volume) (agent.Mount, error) {
	p, err := v.buildPayload(ctx, pod, vol)
	if err != nil {
		return agent.Mount{}, err
	}
	dir := filepath.Join(v.podDir(pod.UID), "files", vol.Name)
	if vol.Secret != nil || vol.Projected != nil {
		if dir, err = v.secretDir(pod, vol.Name); err != nil {
			return agent.Mount{}, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o750); err != nil {
		return agent.Mount{}, err
	}
	defer v.locks.Lock(dir)()
	if err := writeAtomically(dir, p, fsGroup(pod)); err != nil {
		return agent.Mount{}, err
	}
	return agent.Mount{HostPath: dir, ReadOnly: true}, nil
}

func (v *fileVolumes) buildPayload(ctx context.Context, pod *v1.Pod, vol *v1.Volume) (payload, error) {
	p := payload{}
	switch {
	case vol.ConfigMap != nil:
		s := vol.ConfigMap
		return p, v.addConfigMap(p, pod.Namespace, s.Name, s.Items, ptr.Deref(s.DefaultMode, 0o644), s.Optional)
	case vol.Secret != nil:
		s := vol.Secret
		return p, v.addSecret(p, pod.Namespace, s.SecretName, s.Items, ptr.Deref(s.DefaultMode, 0o644), s.Optional)
	case vol.DownwardAPI != nil:
		return p, v.addDownwardAPI(p, pod, vol.DownwardAPI.Items, ptr.Deref(vol.DownwardAPI.DefaultMode, 0o644))
	}
	byDefault := ptr.Deref(vol.Projected.DefaultMode, 0o644)
	for i := range vol.Projected.Sources {
		if err := v.addProjection(ctx, p, pod, &vol.Projected.Sources[i], byDefault); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (v *fileVolumes) addProjection(
	ctx context.Context, p payload, pod *v1.Pod, s *v1.VolumeProjection, byDefault int32,
) error {
	switch {
	case s.ConfigMap != nil:
		return v.addConfigMap(p, pod.Namespace, s.ConfigMap.Name, s.ConfigMap.Items, byDefault, s.ConfigMap.Optional)
	case s.Secret != nil:
		return v.addSecret(p, pod.Namespace, s.Secret.Name, s.Secret.Items, byDefault, s.Secret.Optional)
	case s.DownwardAPI != nil:
		return v.addDownwardAPI(p, pod, s.DownwardAPI.Items, byDefault)
	case s.ServiceAccountToken != nil:
		return v.addToken(ctx, p, pod, s.ServiceAccountToken, byDefault)
	}
	return fmt.Errorf("this kind of projected source is not supported on this node")
}

// addToken adds the file of a bound service account token to the payload. If all containers run as
// one user, the file belongs to that user. If it has such an owner, or the pod has an fsGroup,
// other users cannot read it, whatever the volume's mode is. The fsGroup adds mode 0440.
func (v *fileVolumes) addToken(
	ctx context.Context, p payload, pod *v1.Pod, s *v1.ServiceAccountTokenProjection, byDefault int32,
) error {
	seconds := ptr.Deref(s.ExpirationSeconds, int64(3600))
	token, _, err := v.cfg.Objects.Token(ctx, pod, s.Audience, seconds)
	if err != nil {
		return fmt.Errorf("failed to fetch token of serviceaccount %s/%s: %w", pod.Namespace,
			pod.Spec.ServiceAccountName, err)
	}
	f := projectedFile{data: []byte(token), mode: byDefault}
	if f.uid = onlyUser(pod); f.uid != nil || fsGroup(pod) != nil {
		f.mode = 0o600
	}
	p[filepath.Clean(s.Path)] = f
	return nil
}

// onlyUser returns the user ID that all containers of the pod run as, or nil if the IDs differ or
// are not specified.
func onlyUser(pod *v1.Pod) *int64 {
	var user *int64
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			var u *int64
			if sc := pod.Spec.SecurityContext; sc != nil {
				u = sc.RunAsUser
			}
			if sc := list[i].SecurityContext; sc != nil && sc.RunAsUser != nil {
				u = sc.RunAsUser
			}
			if u == nil || user != nil && *user != *u {
				return nil
			}
			user = u
		}
	}
	return user
}

func isOptional(b *bool) bool { return b != nil && *b }

func (v *fileVolumes) addConfigMap(
	p payload, ns, name string, items []v1.KeyToPath, byDefault int32, optional *bool,
) error {
	cm, ok := v.cfg.Objects.ConfigMap(ns, name)
	if !ok {
		if isOptional(optional) {
			return nil
		}
		return fmt.Errorf("configmap \"%s/%s\" not found", ns, name)
	}
	data := make(map[string][]byte, len(cm.Data)+len(cm.BinaryData))
	for k, s := range cm.Data {
		data[k] = []byte(s)
	}
	maps.Copy(data, cm.BinaryData)
	return p.addKeys(data, items, byDefault, isOptional(optional), fmt.Sprintf("configmap \"%s/%s\"", ns, name))
}

func (v *fileVolumes) addSecret(
	p payload, ns, name string, items []v1.KeyToPath, byDefault int32, optional *bool,
) error {
	s, ok := v.cfg.Objects.Secret(ns, name)
	if !ok {
		if isOptional(optional) {
			return nil
		}
		return fmt.Errorf("secret \"%s/%s\" not found", ns, name)
	}
	return p.addKeys(s.Data, items, byDefault, isOptional(optional), fmt.Sprintf("secret \"%s/%s\"", ns, name))
}

// addKeys adds the keys of data to the payload as files: the keys that items selects, or all keys
// if items is empty. byDefault is the mode of files without their own mode. A selected key that is
// missing is an error unless optional is set. from is the name of the source in that error.
func (p payload) addKeys(
	data map[string][]byte, items []v1.KeyToPath, byDefault int32, optional bool, from string,
) error {
	if len(items) == 0 {
		for _, k := range slices.Sorted(maps.Keys(data)) {
			p[k] = projectedFile{data: data[k], mode: byDefault}
		}
		return nil
	}
	for _, it := range items {
		b, ok := data[it.Key]
		if !ok {
			if optional {
				continue
			}
			return fmt.Errorf("%s has no key %q", from, it.Key)
		}
		m := ptr.Deref(it.Mode, byDefault)
		p[filepath.Clean(it.Path)] = projectedFile{data: b, mode: m}
	}
	return nil
}

func (v *fileVolumes) addDownwardAPI(p payload, pod *v1.Pod, items []v1.DownwardAPIVolumeFile, byDefault int32) error {
	for _, it := range items {
		m := ptr.Deref(it.Mode, byDefault)
		var text string
		var err error
		switch {
		case it.FieldRef != nil:
			text, err = agent.FieldValue(pod, it.FieldRef.FieldPath)
		case it.ResourceFieldRef != nil:
			var alloc v1.ResourceList
			if v.cfg.Allocatable != nil {
				alloc = v.cfg.Allocatable()
			}
			text, err = agent.ResourceValue(pod, it.ResourceFieldRef.ContainerName, it.ResourceFieldRef, alloc)
		}
		if err != nil {
			return fmt.Errorf("downwardAPI file %q: %w", it.Path, err)
		}
		p[filepath.Clean(it.Path)] = projectedFile{data: []byte(text), mode: m}
	}
	return nil
}
