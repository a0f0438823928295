// Package volume mounts the volumes of pods: emptyDir, hostPath, configMap, secret, projected,
// downwardAPI, nfs, iscsi, csi (inline) and persistentVolumeClaim (hostPath, local, NFS, iSCSI and
// CSI volumes).
//
// After a restart, all volumes are found by their paths:
//
//	STATE/volumes/UID/empty/NAME     emptyDir; for medium Memory a tmpfs is mounted there
//	STATE/volumes/UID/files/NAME     configMap, downwardAPI
//	STATE/volumes/UID/disk/NAME      local volume: the file system of a block device, mounted for
//	                                 the pod; or a folder with the volume's mount options
//	STATE/volumes/UID/nfs/NAME       a folder of an NFS server, mounted for the pod
//	STATE/volumes/UID/iscsi/NAME     a disk of an iSCSI target, bind-mounted for the pod; its
//	                                 record NAME.json is written before the login
//	STATE/volumes/UID/alone/CLAIM    reservation of a ReadWriteOncePod claim: no other pod of the node
//	                                 may use the claim, or the volume that the file names
//	STATE/volumes/UID/csi/NAME.json  record of a CSI volume, written before its driver is called
//	RUN/secrets/UID/NAME             secret, projected: on one tmpfs, never written to a disk
//	KUBELET/pods/UID/volumes/kubernetes.io~csi/PV/mount
//	                                 target path of a CSI volume
//	KUBELET/plugins/kubernetes.io/csi/DRIVER/HASH/globalmount
//	                                 staging path of a CSI volume, one for all pods of the node
//	KUBELET/plugins/kubernetes.io/csi/volumeDevices/publish/PV/UID, staging/PV
//	                                 both paths of a CSI block device
//	KUBELET/plugins/kubernetes.io/iscsi/INTERFACE/TARGET/lun-N
//	                                 mount of an iSCSI disk, one for all pods of the node;
//	                                 target.json beside it is the state of the logins
//
// Paths below KUBELET are those of the kubelet, because CSI drivers expect them. A record contains
// its paths, so that paths of an earlier release remain valid.
//
// There is no other state. After a crash every call can be repeated, and UnmountAll finds what to
// remove in the mount table and in these folders.
package volume

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"keelson.dev/keelson/internal/wakeup"
)

// Config is the configuration of Volumes.
type Config struct {
	Paths   agent.Paths
	Objects agent.Objects
	CSI     *csi.Registry // may be nil: no CSI volumes
	// Allocatable returns the node's allocatable resources, for downwardAPI volumes; may be nil.
	Allocatable func() v1.ResourceList
	// Report records an event about a pod's volumes; may be nil.
	Report func(*v1.Event)
	// Fenced reports whether the node has been disconnected for so long that its attached volumes
	// may be attached to another node. nil = never.
	Fenced func() bool
	NFS    nfs.Node
	ISCSI  iscsi.Node
	Log    *slog.Logger // may be nil
}

// Volumes mounts and unmounts the volumes of the pods of this node. It implements agent.Volumes and
// agent.AttachedVolumes.
type Volumes struct {
	*layout
	locks       keylock.Locks // of local and NFS volumes, by path or device
	files       fileVolumes
	attachments attachments
	claims      exclusiveClaims
	csi         csiVolumes
	iscsi       iscsiVolumes
}

var (
	_ agent.Volumes         = (*Volumes)(nil)
	_ agent.AttachedVolumes = (*Volumes)(nil)
)

// New returns Volumes with the configuration. It accesses nothing on the node.
func New(cfg Config) *Volumes {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	v := &Volumes{layout: &layout{cfg: &cfg}}
	v.files.layout = v.layout
	v.attachments = attachments{layout: v.layout, uses: wakeup.New()}
	v.claims = exclusiveClaims{layout: v.layout, attachments: &v.attachments}
	v.csi = csiVolumes{layout: v.layout, attachments: &v.attachments}
	v.iscsi = iscsiVolumes{layout: v.layout, attachments: &v.attachments}
	return v
}

// checkUID returns an error if a pod's UID cannot be the name of a folder.
func checkUID(uid types.UID) error {
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") || uid == "." || uid == ".." {
		return fmt.Errorf("pod uid %q cannot name a folder", uid)
	}
	return nil
}

// MountAll mounts all volumes of the pod concurrently and returns the mounts by volume name. If
// volumes fail, it returns the joined errors of all of them. It may be repeated. It implements
// agent.Volumes.
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
			m, err := v.mountVolume(ctx, pod, vol)
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
	_ = g.Wait() // Wait returns nil: errors are collected in errs
	if len(errs) > 0 {
		slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		return nil, errors.Join(errs...)
	}
	return out, nil
}

func (v *Volumes) mountVolume(ctx context.Context, pod *v1.Pod, vol *v1.Volume) (agent.Mount, error) {
	switch {
	case vol.EmptyDir != nil:
		return v.emptyDir(pod, vol)
	case vol.HostPath != nil:
		return hostPath(vol.HostPath)
	case vol.ConfigMap != nil, vol.DownwardAPI != nil, vol.Secret != nil, vol.Projected != nil:
		return v.files.writeFiles(ctx, pod, vol)
	case vol.PersistentVolumeClaim != nil, vol.Ephemeral != nil:
		return v.mountClaim(ctx, pod, vol)
	case vol.CSI != nil:
		return v.csi.mountCSI(ctx, pod, vol.Name, inlineSource(pod, vol))
	case vol.NFS != nil:
		return v.mountNFS(ctx, pod, vol.Name, nfs.Volume{Server: vol.NFS.Server, Path: vol.NFS.Path,
			ReadOnly: vol.NFS.ReadOnly})
	case vol.ISCSI != nil:
		s, err := inlineISCSI(pod, vol.Name, vol.ISCSI)
		if err != nil {
			return agent.Mount{}, err
		}
		return v.iscsi.mountISCSI(ctx, pod, vol.Name, s)
	case hasNoSource(vol):
		return v.emptyDir(pod, vol) // the API's default
	}
	return agent.Mount{}, errors.New("this kind of volume is not supported on this node")
}

// hasNoSource reports whether a volume has no source (emptyDir, hostPath, ...).
func hasNoSource(vol *v1.Volume) bool { return vol.VolumeSource == (v1.VolumeSource{}) }

// Refresh updates the content of a pod's mounted volumes. It rewrites configMap, secret, projected
// and downwardAPI volumes if their content has changed. It publishes CSI volumes again if their
// driver has requiresRepublish. It tries all volumes and joins the errors. It implements
// agent.Volumes.
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
			_, err = v.files.writeFiles(ctx, pod, vol)
		case vol.CSI != nil, vol.PersistentVolumeClaim != nil, vol.Ephemeral != nil:
			err = v.csi.republishCSI(ctx, pod, vol)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("refreshing volume %q of pod %s/%s: %w", vol.Name, pod.Namespace,
				pod.Name, err))
		}
	}
	return errors.Join(errs...)
}

// UnmountAll unmounts and removes all volumes of the pod, including the data of its emptyDir
// volumes. It succeeds if the pod has none, and may be repeated after a failure. It implements
// agent.Volumes.
func (v *Volumes) UnmountAll(ctx context.Context, pod types.UID) error {
	if err := checkUID(pod); err != nil {
		return err
	}
	dir := v.podDir(pod)
	defer v.claims.dropClaimMarks(pod)
	if err := v.csi.releaseCSI(ctx, pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	if err := v.iscsi.releaseISCSI(ctx, pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	if err := v.csi.removeCSILeftovers(pod); err != nil {
		return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
	}
	for _, d := range []string{dir, filepath.Join(v.secretRoot(), string(pod))} {
		if err := unmountBelow(ctx, d); err != nil {
			return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
		}
		// Nothing is mounted below, so this removes only data of the pod.
		if err := safepath.RemoveAll(d); err != nil {
			return fmt.Errorf("removing volumes of pod %s: %w", pod, err)
		}
	}
	return nil
}

// fsGroup returns the fsGroup in a pod's security context, or nil.
func fsGroup(pod *v1.Pod) *int64 {
	if pod.Spec.SecurityContext == nil {
		return nil
	}
	return pod.Spec.SecurityContext.FSGroup
}

// Disk returns the usage of a pod's volume as reported by its CSI driver. ok is false if the volume
// is not a CSI volume, or its driver does not report the usage. The caller then measures the file
// system. It returns an error if the usage cannot be determined in either way.
func (v *Volumes) Disk(ctx context.Context, uid types.UID, volume string) (disk agent.Disk, ok bool, err error) {
	return v.csi.diskUsage(ctx, uid, volume)
}

// Call calls a CSI driver of this node for the control plane, and returns the encoded response. For
// NodeExpandVolume it uses only the volume ID and the size of the request, and adds paths and
// secrets itself. It implements agent.DriverCalls.
func (v *Volumes) Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) (
	[]byte, error,
) {
	return v.csi.callDriver(ctx, driver, method, request, timeout)
}

// ExclusiveClaims returns the ReadWriteOncePod claims that pods of this node have reserved, as
// recorded on disk. It implements agent.AttachedVolumes.
func (v *Volumes) ExclusiveClaims() ([]agent.HeldClaim, error) { return v.claims.reservations() }
