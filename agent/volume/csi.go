package volume

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/wholefile"
)

// record is what is known of a CSI volume of a pod after a crash.
type record struct {
	Driver  string `json:"driver"`
	Volume  string `json:"volume"`
	Staging string `json:"staging"`
	Target  string `json:"target"`
	Ready   bool   `json:"ready,omitempty"` // all that is done to it before a container sees it has been done
}

// kubelet is the folder whose layout drivers know.
func (v *Volumes) kubelet() string {
	if v.cfg.Paths.Kubelet != "" {
		return v.cfg.Paths.Kubelet
	}
	return filepath.Join(v.cfg.Paths.State, "kubelet")
}

func (v *Volumes) stagingPath(driver, handle string) string {
	return filepath.Join(v.kubelet(), "plugins", "kubernetes.io", "csi", driver,
		fmt.Sprintf("%x", sha256.Sum256([]byte(handle))), "globalmount")
}

func (v *Volumes) targetPath(pod types.UID, name string) string {
	return filepath.Join(v.kubelet(), "pods", string(pod), "volumes", "kubernetes.io~csi", name, "mount")
}

// place says where a volume is staged and published for a pod: where that was done already, by this release or one with
// other paths, else where kubelet would. The volume is locked.
func (v *Volumes) place(pod types.UID, name string, pv *v1.PersistentVolume) (record, error) {
	src := pv.Spec.CSI
	r := record{Driver: src.Driver, Volume: src.VolumeHandle, Staging: v.stagingPath(src.Driver, src.VolumeHandle),
		Target: v.targetPath(pod, pv.Name)}
	pods, err := v.Pods()
	if err != nil {
		return r, err
	}
	for _, p := range pods {
		recs, err := v.records(p)
		if err != nil {
			return r, err
		}
		for file, o := range recs {
			if o.Driver != r.Driver || o.Volume != r.Volume {
				continue
			}
			r.Staging = o.Staging
			switch {
			case p != pod:
			case file == v.recordFile(pod, name):
				r.Target = o.Target
				return r, nil
			case o.Target == r.Target: // two volumes of the pod are one claim
				r.Target = v.targetPath(pod, pv.Name+"~"+name)
			}
		}
	}
	return r, nil
}

func (v *Volumes) recordFile(pod types.UID, name string) string {
	return filepath.Join(v.podDir(pod), "csi", name+".json")
}

func (v *Volumes) csi(ctx context.Context, pod *v1.Pod, name string, pv *v1.PersistentVolume,
	readonly bool) (agent.Mount, error) {
	src := pv.Spec.CSI
	if v.cfg.CSI == nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w: %s", pv.Name, csi.ErrNoDriver, src.Driver)
	}
	if strings.ContainsAny(src.Driver, "/\x00") || src.Driver == "" || strings.HasPrefix(src.Driver, ".") {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %q is no name of a driver", pv.Name, src.Driver)
	}
	defer v.locks.Lock(src.Driver + "\x00" + src.VolumeHandle)()
	r, err := v.place(pod.UID, name, pv)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	file := v.recordFile(pod.UID, name)
	if v.ready(file, r) {
		return agent.Mount{HostPath: r.Target, ReadOnly: readonly}, nil
	}
	d, err := v.cfg.CSI.Driver(ctx, src.Driver)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	about, _ := v.cfg.Objects.CSIDriver(src.Driver)
	cv, err := v.describe(pod, pv, r, readonly)
	if err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	// On disk before the driver hears of it: what it does is undone even when we are killed in the middle.
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	for _, dir := range []string{r.Staging, filepath.Dir(r.Target)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return agent.Mount{}, err
		}
	}
	if err := d.Stage(ctx, cv); err != nil {
		return agent.Mount{}, err
	}
	if err := v.addressedTo(ctx, &cv, pod, about); err != nil {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
	}
	if err := d.Publish(ctx, cv); err != nil {
		return agent.Mount{}, err
	}
	if !isMounted(r.Target) {
		return agent.Mount{}, fmt.Errorf("persistentvolume %q: CSI driver %s says that volume %s is published, but nothing is mounted at %s: "+
			"a driver in a container needs %s with mountPropagation Bidirectional", pv.Name, r.Driver, r.Volume, r.Target, v.kubelet())
	}
	if !readonly && !d.AppliesGroup() && groupWanted(about, pv) {
		if err := applyGroup(r.Target, pod); err != nil {
			return agent.Mount{}, fmt.Errorf("persistentvolume %q: %w", pv.Name, err)
		}
	}
	r.Ready = true
	if err := writeRecord(file, r); err != nil {
		return agent.Mount{}, err
	}
	return agent.Mount{HostPath: r.Target, ReadOnly: readonly}, nil
}

// ready says that the volume was set up by an earlier run and is still mounted: the pod may be running on it.
func (v *Volumes) ready(file string, r record) bool {
	b, err := os.ReadFile(file)
	if err != nil {
		return false
	}
	var old record
	if json.Unmarshal(b, &old) != nil {
		return false
	}
	r.Ready = true
	return old == r && isMounted(r.Target)
}

// describe puts together what the driver is told of the volume, for whichever pod.
func (v *Volumes) describe(pod *v1.Pod, pv *v1.PersistentVolume, r record, readonly bool) (csi.Volume, error) {
	src := pv.Spec.CSI
	cv := csi.Volume{ID: r.Volume, StagingPath: r.Staging, TargetPath: r.Target, FSType: src.FSType,
		MountFlags: pv.Spec.MountOptions, ReadOnly: readonly, FSGroup: fsGroup(pod), VolumeContext: map[string]string{}}
	for k, s := range src.VolumeAttributes {
		cv.VolumeContext[k] = s
	}
	if len(pv.Spec.AccessModes) > 0 {
		cv.AccessMode = string(pv.Spec.AccessModes[0])
	}
	var err error
	if cv.StageSecrets, err = v.driverSecret(src.NodeStageSecretRef); err != nil {
		return cv, err
	}
	cv.PublishSecrets, err = v.driverSecret(src.NodePublishSecretRef)
	return cv, err
}

// addressedTo adds what a driver asks to be told of the pod when a volume is published for it: who the pod is
// (podInfoOnMount), and tokens of its service account (tokenRequests).
func (v *Volumes) addressedTo(ctx context.Context, cv *csi.Volume, pod *v1.Pod, about *storagev1.CSIDriver) error {
	if about == nil {
		return nil
	}
	cv.VolumeContext = maps.Clone(cv.VolumeContext)
	if p := about.Spec.PodInfoOnMount; p != nil && *p {
		cv.VolumeContext["csi.storage.k8s.io/pod.name"] = pod.Name
		cv.VolumeContext["csi.storage.k8s.io/pod.namespace"] = pod.Namespace
		cv.VolumeContext["csi.storage.k8s.io/pod.uid"] = string(pod.UID)
		cv.VolumeContext["csi.storage.k8s.io/serviceAccount.name"] = pod.Spec.ServiceAccountName
		cv.VolumeContext["csi.storage.k8s.io/ephemeral"] = "false"
	}
	if len(about.Spec.TokenRequests) == 0 {
		return nil
	}
	type token struct {
		Token   string    `json:"token"`
		Expires time.Time `json:"expirationTimestamp"`
	}
	tokens := map[string]token{}
	for _, want := range about.Spec.TokenRequests {
		seconds := int64(3600)
		if want.ExpirationSeconds != nil {
			seconds = *want.ExpirationSeconds
		}
		text, expires, err := v.cfg.Objects.Token(ctx, pod, want.Audience, seconds)
		if err != nil {
			return fmt.Errorf("a token of service account %s/%s for CSI driver %s: %w", pod.Namespace,
				pod.Spec.ServiceAccountName, about.Name, err)
		}
		tokens[want.Audience] = token{text, expires.UTC()}
	}
	data, err := json.Marshal(tokens)
	if err != nil {
		return err
	}
	cv.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"] = string(data)
	return nil
}

func (v *Volumes) driverSecret(ref *v1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, ok := v.cfg.Objects.Secret(ref.Namespace, ref.Name)
	if !ok {
		return nil, fmt.Errorf("secret \"%s/%s\" not found", ref.Namespace, ref.Name)
	}
	out := map[string]string{}
	for k, b := range s.Data {
		out[k] = string(b)
	}
	return out, nil
}

// groupWanted follows fsGroupPolicy; by default a group is applied to volumes with a file system for one node.
func groupWanted(about *storagev1.CSIDriver, pv *v1.PersistentVolume) bool {
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if about != nil && about.Spec.FSGroupPolicy != nil {
		policy = *about.Spec.FSGroupPolicy
	}
	switch policy {
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.FileFSGroupPolicy:
		return true
	default:
		return pv.Spec.CSI.FSType != "" && slices.Contains(pv.Spec.AccessModes, v1.ReadWriteOnce)
	}
}

func writeRecord(path string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return wholefile.Write(path, b)
}

// records lists the CSI volumes of a pod by the path of their record.
func (v *Volumes) records(uid types.UID) (map[string]record, error) {
	files, err := filepath.Glob(filepath.Join(v.podDir(uid), "csi", "*.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]record{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var r record
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, fmt.Errorf("record of a CSI volume %s: %w", f, err)
		}
		out[f] = r
	}
	return out, nil
}

// releaseCSI unpublishes the pod's CSI volumes and unstages those that no other pod uses.
func (v *Volumes) releaseCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.records(uid)
	if err != nil {
		return err
	}
	var errs []error
	for file, r := range recs {
		if err := v.release(ctx, uid, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) release(ctx context.Context, uid types.UID, file string, r record) error {
	defer v.locks.Lock(r.Driver + "\x00" + r.Volume)()
	last, err := v.lastUser(file, r)
	if err != nil {
		return err
	}
	if v.cfg.CSI == nil {
		return fmt.Errorf("CSI volume %s: %w: %s", r.Volume, csi.ErrNoDriver, r.Driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, r.Driver)
	if err != nil {
		// Without the driver only what is not mounted (any more) can be forgotten.
		if isMounted(r.Target) || last && isMounted(r.Staging) {
			return fmt.Errorf("CSI volume %s: %w", r.Volume, err)
		}
		if err := v.leave(r, last); err != nil {
			return err
		}
		return os.Remove(file)
	}
	// A volume that the driver does not know was never published, or is gone: with nothing mounted nothing is to be
	// undone.
	undone := func(err error, at string) bool { return err == nil || csi.IsUnknownVolume(err) && !isMounted(at) }
	if err := d.Unpublish(ctx, r.Volume, r.Target); !undone(err, r.Target) {
		return err
	}
	if last {
		if err := d.Unstage(ctx, r.Volume, r.Staging); !undone(err, r.Staging) {
			return err
		}
	}
	if err := v.leave(r, last); err != nil {
		return err
	}
	return os.Remove(file)
}

// leave removes the folders of a volume that is mounted no more. What is still in one of them is somebody's data:
// nothing is removed but what is empty.
func (v *Volumes) leave(r record, last bool) error {
	paths := []string{r.Target}
	if last {
		paths = append(paths, r.Staging)
	}
	for _, p := range paths {
		if isMounted(p) {
			return fmt.Errorf("volume %s of CSI driver %s is still mounted at %s", r.Volume, r.Driver, p)
		}
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("volume %s of CSI driver %s is not mounted any more, and there is something left at its place, "+
				"which is not removed: move it away and remove the folder: %w", r.Volume, r.Driver, err)
		}
		for dir := filepath.Dir(p); v.ours(dir) && os.Remove(dir) == nil; dir = filepath.Dir(dir) {
		}
	}
	return nil
}

// ours says that a folder stands for one pod or one volume, and goes when it is empty.
func (v *Volumes) ours(dir string) bool {
	for _, root := range []string{filepath.Join(v.kubelet(), "pods"),
		filepath.Join(v.kubelet(), "plugins", "kubernetes.io", "csi"),
		filepath.Join(v.cfg.Paths.State, "csi"), filepath.Join(v.cfg.Paths.State, "volumes")} {
		if strings.HasPrefix(dir, root+"/") {
			return true
		}
	}
	return false
}

// sweepCSI removes what a pod's CSI volumes left beside their records, as far as it is empty.
func (v *Volumes) sweepCSI(pod types.UID) error {
	dir := filepath.Join(v.podDir(pod), "csi")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := filepath.Join(dir, e.Name())
		if e.IsDir() {
			if err := os.Remove(filepath.Join(p, "mount")); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("something is left at the place of a CSI volume, which is not removed: %w", err)
			}
		}
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

func isMounted(path string) bool {
	ok, err := mountinfo.Mounted(path)
	return err == nil && ok
}

// lastUser says that nothing else on the node uses the volume: no other pod, and no other volume of the same pod.
func (v *Volumes) lastUser(file string, r record) (bool, error) {
	pods, err := v.Pods()
	if err != nil {
		return false, err
	}
	for _, p := range pods {
		recs, err := v.records(p)
		if err != nil {
			return false, err
		}
		for other, o := range recs {
			if other != file && o.Driver == r.Driver && o.Volume == r.Volume {
				return false, nil
			}
		}
	}
	return true, nil
}
