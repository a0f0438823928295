// Package volume prepares the volumes of pods: emptyDir, hostPath, configMap, secret,
// projected, downwardAPI, nfs, iscsi, csi (inline) and persistentVolumeClaim (hostPath, local, NFS, iSCSI and CSI volumes).
//
// What it makes is found again by its place on disk:
//
//	STATE/volumes/UID/empty/NAME     emptyDir; a tmpfs is mounted there for medium Memory
//	STATE/volumes/UID/files/NAME     configMap, downwardAPI
//	STATE/volumes/UID/disk/NAME      the file system on a block device of a local PersistentVolume, mounted for the pod; or
//	                                 a folder of one that has mount options, with those
//	STATE/volumes/UID/nfs/NAME       a folder of an NFS server, mounted for the pod
//	STATE/volumes/UID/iscsi/NAME     a disk of an iSCSI target, bound for the pod; NAME.json says which, before it is logged in to
//	STATE/volumes/UID/alone/CLAIM    that no other pod of the node may use the claim, nor its volume, which is named in it
//	RUN/secrets/UID/NAME             secret, projected: one tmpfs for all, so that no secret touches a disk
//	STATE/volumes/UID/csi/NAME.json  a CSI volume: written before the driver is first called
//	KUBELET/pods/UID/volumes/kubernetes.io~csi/PV/mount           where it is published
//	KUBELET/plugins/kubernetes.io/csi/DRIVER/HASH/globalmount   where it is staged, once for all pods of the node
//	KUBELET/plugins/kubernetes.io/iscsi/INTERFACE/TARGET/lun-N   where such a disk is mounted, once for all pods of the node;
//	                                 target.json beside it says what was done to log in
//	KUBELET/plugins/kubernetes.io/csi/volumeDevices/publish/PV/UID, staging/PV   both of these, of a block device
//
// The last ones are kubelet's, since drivers know them. A record names them: one of a release with other paths is kept
// to.
//
// Nothing else is remembered: after a crash every call can be made again, and UnmountAll
// finds what there is to take away in the mount table and these folders.
package volume

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/iscsi"
	"keelson.dev/keelson/agent/volume/nfs"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/keylock"
	"keelson.dev/keelson/internal/safepath"
)

// Config is what volumes need.
type Config struct {
	Paths   agent.Paths
	Objects agent.Objects
	CSI     *csi.Registry // may be nil: no CSI volumes
	// Allocatable is the node's, for resources in downwardAPI volumes; may be nil.
	Allocatable func() v1.ResourceList
	// Report takes events about pods' volumes; may be nil.
	Report func(*v1.Event)
	// Fenced says that the control plane has not been heard for so long that attached volumes may be another node's by
	// now; nil: never.
	Fenced func() bool
	NFS    nfs.Node
	ISCSI  iscsi.Node
	Log    *slog.Logger // may be nil
}

// Volumes implements agent.Volumes.
type Volumes struct {
	cfg   Config
	mu    sync.Mutex
	tmpfs bool // RUN/secrets is mounted
	// publishedAt is when the driver of a CSI volume was last called to publish it, by its record.
	publishedAt map[string]time.Time
	doubtful    map[string]bool      // records of volumes whose driver did not say that it published them
	late        map[string]time.Time // places of such that are gone, since when
	locks       keylock.Locks
	untold      map[agent.HeldClaim]bool // marks of this agent of which the control plane is not known to have heard
	uses        chan struct{}            // buffered: attached volumes are used, or are no more
}

var (
	_ agent.Volumes         = (*Volumes)(nil)
	_ agent.AttachedVolumes = (*Volumes)(nil)
)

// New touches nothing.
func New(cfg Config) *Volumes {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Volumes{cfg: cfg, uses: make(chan struct{}, 1)}
}

func (v *Volumes) podDir(uid types.UID) string {
	return filepath.Join(v.cfg.Paths.State, "volumes", string(uid))
}

func (v *Volumes) secretRoot() string { return filepath.Join(v.cfg.Paths.Run, "secrets") }

// checkUID refuses what could not be the name of a folder.
func checkUID(uid types.UID) error {
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") || uid == "." || uid == ".." {
		return fmt.Errorf("pod uid %q cannot name a folder", uid)
	}
	return nil
}

// MountAll implements agent.Volumes. Volumes are prepared at the same time; the error joins those of all that failed.
func (v *Volumes) MountAll(ctx context.Context, pod *v1.Pod) (map[string]agent.Mount, error) {
	if err := checkUID(pod.UID); err != nil {
		return nil, err
	}
	var (
		mu   sync.Mutex
		errs []error
		out  = make(map[string]agent.Mount, len(pod.Spec.Volumes))
		g    errgroup.Group
	)
	for i := range pod.Spec.Volumes {
		vol := &pod.Spec.Volumes[i]
		g.Go(func() error {
			m, err := v.mount(ctx, pod, vol)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("MountVolume.SetUp failed for volume %q : %w", vol.Name, err))
				return nil
			}
			out[vol.Name] = m
			return nil
		})
	}
	_ = g.Wait() // errors are in errs
	if len(errs) > 0 {
		slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		return nil, errors.Join(errs...)
	}
	return out, nil
}

func (v *Volumes) mount(ctx context.Context, pod *v1.Pod, vol *v1.Volume) (agent.Mount, error) {
	switch {
	case vol.EmptyDir != nil:
		return v.emptyDir(pod, vol)
	case vol.HostPath != nil:
		return hostPath(vol.HostPath)
	case vol.ConfigMap != nil, vol.DownwardAPI != nil, vol.Secret != nil, vol.Projected != nil:
		return v.files(ctx, pod, vol)
	case vol.PersistentVolumeClaim != nil, vol.Ephemeral != nil:
		return v.claim(ctx, pod, vol)
	case vol.CSI != nil:
		return v.csi(ctx, pod, vol.Name, inline(pod, vol))
	case vol.NFS != nil:
		return v.nfs(ctx, pod, vol.Name, nfs.Volume{Server: vol.NFS.Server, Path: vol.NFS.Path, ReadOnly: vol.NFS.ReadOnly})
	case vol.ISCSI != nil:
		s, err := inlineISCSI(pod, vol.Name, vol.ISCSI)
		if err != nil {
			return agent.Mount{}, err
		}
		return v.iscsi(ctx, pod, vol.Name, s)
	case sourceless(vol):
		return v.emptyDir(pod, vol) // the API's default
	}
	return agent.Mount{}, errors.New("this kind of volume is not supported on this node")
}

// sourceless says that a volume names no source at all.
func sourceless(vol *v1.Volume) bool { return vol.VolumeSource == (v1.VolumeSource{}) }

// Refresh implements agent.Volumes.
func (v *Volumes) Refresh(ctx context.Context, pod *v1.Pod) error {
	if err := checkUID(pod.UID); err != nil {
		return err
	}
	var errs []error
	for i := range pod.Spec.Volumes {
		vol := &pod.Spec.Volumes[i]
		var err error
		switch {
		case vol.ConfigMap != nil, vol.Secret != nil, vol.Projected != nil, vol.DownwardAPI != nil:
			_, err = v.files(ctx, pod, vol)
		case vol.CSI != nil, vol.PersistentVolumeClaim != nil, vol.Ephemeral != nil:
			err = v.republish(ctx, pod, vol)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("refreshing volume %q of pod %s/%s: %w", vol.Name, pod.Namespace, pod.Name, err))
		}
	}
	return errors.Join(errs...)
}

// UnmountAll implements agent.Volumes.
func (v *Volumes) UnmountAll(ctx context.Context, pod types.UID) error {
	if err := checkUID(pod); err != nil {
		return err
	}
	dir := v.podDir(pod)
	defer v.forgetAlone(pod)
	if err := v.releaseCSI(ctx, pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	if err := v.releaseISCSI(ctx, pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	if err := v.sweepCSI(pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	for _, d := range []string{dir, filepath.Join(v.secretRoot(), string(pod))} {
		if err := unmountBelow(ctx, d); err != nil {
			return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
		}
		// With nothing mounted below, only what is the pod's own is deleted.
		if err := safepath.RemoveAll(d); err != nil {
			return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
		}
	}
	return nil
}

// Pods implements agent.Volumes.
func (v *Volumes) Pods() ([]types.UID, error) {
	seen := map[types.UID]bool{}
	var out []types.UID
	for _, d := range []string{filepath.Join(v.cfg.Paths.State, "volumes"), v.secretRoot()} {
		entries, err := os.ReadDir(d)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("listing pods with volumes: %w", err)
		}
		for _, e := range entries {
			if uid := types.UID(e.Name()); e.IsDir() && !seen[uid] {
				seen[uid] = true
				out = append(out, uid)
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// fsGroup is the group that the pod's volumes shall belong to.
func fsGroup(pod *v1.Pod) *int64 {
	if pod.Spec.SecurityContext == nil {
		return nil
	}
	return pod.Spec.SecurityContext.FSGroup
}
