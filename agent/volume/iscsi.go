package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/disk"
	"keelson.dev/keelson/agent/volume/iscsi"
	"keelson.dev/keelson/agent/volume/remote"
	"keelson.dev/keelson/internal/keylock"
)

// iscsiSource is a disk of an iSCSI target as requested by a pod, through a PersistentVolume or
// inline.
type iscsiSource struct {
	disk                       iscsi.Disk
	messagePrefix              string // prefix of messages that names the PersistentVolume
	pvName                     string // name of the PersistentVolume; "" for an inline volume
	fsType                     string
	options                    []string
	readOnly                   bool // the disk is attached read-only
	podReadOnly                bool // the pod mounts it read-only
	block                      bool
	discoveryCHAP, sessionCHAP bool // discovery and login use the credentials of the secret
	secret                     *v1.SecretReference
}

// iscsiRecord is the record on disk of a pod's iSCSI volume. It is written before the target is
// contacted, so that the disk can be detached after a crash.
type iscsiRecord struct {
	Version   int    `json:"version"`
	Target    string `json:"target"`
	Interface string `json:"interface"`
	LUN       int    `json:"lun"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	Block     bool   `json:"block,omitempty"`
	Attach    bool   `json:"attach,omitempty"` // the volume requires an attachment and is listed in volumesInUse
	// Secret is a salted hash of the pod's credentials. It is empty in records of earlier agents,
	// and for a PersistentVolume with a secret that could not be read.
	Secret   string `json:"secret,omitempty"`
	LoggedIn bool   `json:"loggedIn,omitempty"` // the disk was available to the pod, so its credentials are valid
	// the volume waits for its attachment, and the target was not contacted yet
	Awaits bool `json:"awaits"`
}

// volumeHandle returns the name of the disk within the attached volumes: TARGET:LUN.
func (r iscsiRecord) volumeHandle() string { return fmt.Sprintf("%s:%d", r.Target, r.LUN) }

func (r iscsiRecord) hasSameTarget(o iscsiRecord) bool {
	return r.Target == o.Target && r.Interface == o.Interface
}

func (r iscsiRecord) lockKey() string { return "iscsi\x00" + r.Interface + "\x00" + r.Target }

// iscsiRoot returns the folder that contains the folders of all targets. kubelet is the kubelet's
// folder.
func iscsiRoot(kubelet string) string {
	return filepath.Join(kubelet, "plugins", "kubernetes.io", "iscsi")
}

// RemoveISCSI logs out of all sessions that iSCSI volumes created, and removes their devices and
// iscsiadm's records with passwords. It is for a node that leaves its cluster, after agent and pods
// have stopped and volumes are unmounted. A disk that is still mounted is kept and named in the
// error. Sessions and records that existed before the volumes are kept. kubelet is the folder
// agent.Paths.Kubelet.
func RemoveISCSI(ctx context.Context, kubelet string, node iscsi.Node) error {
	return node.DetachAll(ctx, iscsiRoot(kubelet))
}

// inlineISCSI returns the iscsiSource of an inline iSCSI volume of a pod.
func inlineISCSI(pod *v1.Pod, name string, s *v1.ISCSIVolumeSource) (iscsiSource, error) {
	d, err := iscsi.New(name, s.IQN, s.TargetPortal, s.Portals, s.Lun, s.ISCSIInterface, ptr.Deref(s.InitiatorName, ""))
	out := iscsiSource{disk: d, fsType: s.FSType, readOnly: s.ReadOnly, podReadOnly: s.ReadOnly,
		discoveryCHAP: s.DiscoveryCHAPAuth, sessionCHAP: s.SessionCHAPAuth}
	if s.SecretRef != nil {
		out.secret = &v1.SecretReference{Namespace: pod.Namespace, Name: s.SecretRef.Name}
	}
	return out, err
}

// claimedISCSI returns the source of the iSCSI PersistentVolume pv for a pod. reader is true if the
// pod uses its claim read-only.
func claimedISCSI(pod *v1.Pod, pv *v1.PersistentVolume, reader bool) (iscsiSource, error) {
	s := pv.Spec.ISCSI
	d, err := iscsi.New(pv.Name, s.IQN, s.TargetPortal, s.Portals, s.Lun, s.ISCSIInterface,
		ptr.Deref(s.InitiatorName, ""))
	out := iscsiSource{disk: d, messagePrefix: fmt.Sprintf("persistentvolume %q: ", pv.Name), pvName: pv.Name,
		fsType: s.FSType, options: pv.Spec.MountOptions, readOnly: s.ReadOnly,
		podReadOnly: reader || s.ReadOnly, block: isBlock(pv), discoveryCHAP: s.DiscoveryCHAPAuth,
		sessionCHAP: s.SessionCHAPAuth}
	if s.SecretRef != nil {
		ref := *s.SecretRef
		if ref.Namespace == "" {
			ref.Namespace = pod.Namespace
		}
		out.secret = &ref
	}
	if err != nil {
		err = fmt.Errorf("%s%w", out.messagePrefix, err)
	}
	return out, err
}

// iscsiVolumes mounts iSCSI disks and unmounts them. Pods of the node share the session with a
// target, and the mount of a disk.
type iscsiVolumes struct {
	*layout
	attachments *attachments
	locks       keylock.Locks // by target and iscsiadm interface
}

// mountISCSI attaches an iSCSI disk to the node and mounts it for a pod. If the disk is already
// mounted, the target is not contacted.
func (v *iscsiVolumes) mountISCSI(ctx context.Context, pod *v1.Pod, name string, s iscsiSource) (agent.Mount, error) {
	fail := func(err error) (agent.Mount, error) { return agent.Mount{}, fmt.Errorf("%s%w", s.messagePrefix, err) }
	r := iscsiRecord{Version: 1, Target: s.disk.Target, Interface: s.disk.Interface, LUN: s.disk.LUN,
		ReadOnly: s.readOnly, Block: s.block, Attach: s.pvName != ""}
	defer v.locks.Lock(r.lockKey())()
	place := filepath.Join(v.podDir(pod.UID), "iscsi", name)
	m := agent.Mount{HostPath: place, ReadOnly: s.podReadOnly, Block: s.block}
	if is, err := isMountPoint(place); is && !s.block || err != nil {
		return m, err
	}
	file := place + ".json"
	if err := errors.Join(v.checkISCSIConflict(file, r), v.checkISCSICredentials(s, file, &r)); err != nil {
		return fail(err)
	}
	r.Awaits = r.Attach && isAwaitingAttach(file, func() bool { return v.isISCSIUntouched(s, r) })
	if err := errors.Join(writeRecord(file, r), os.MkdirAll(v.iscsiDir(r), 0o750)); err != nil {
		return fail(err)
	}
	if r.Attach {
		if _, err := v.attachments.awaitAttached(ctx, csiSource{name: s.pvName, driver: iscsiAttacher,
			handle: r.volumeHandle()}); err != nil {
			return agent.Mount{}, err
		}
	}
	if r.Awaits {
		r.Awaits = false
		if err := writeRecord(file, r); err != nil {
			return fail(err)
		}
		v.attachments.signalUses()
	}
	var err error
	if s.block {
		m.HostPath, err = v.attachISCSI(ctx, s, r)
	} else if err = v.mountISCSIGlobal(ctx, s, r); err == nil {
		err = bindMount(v.iscsiGlobalPath(r), place)
	}
	if r.LoggedIn = true; err == nil {
		err = writeRecord(file, r)
	}
	if err != nil {
		return fail(err)
	}
	if !s.block && !s.podReadOnly && fsGroup(pod) != nil {
		if err := v.runOnce(pod.UID, name, func() error { return applyGroup(place, pod) }); err != nil {
			return fail(err)
		}
	}
	return m, nil
}

// bindMount bind-mounts one folder, from, on another.
func bindMount(from, at string) error {
	if err := os.MkdirAll(at, 0o750); err != nil {
		return err
	}
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s at %s: %w", from, at, err)
	}
	return nil
}

// checkISCSIConflict returns an error if another volume on this node uses the disk of r with
// another volumeMode or another readOnly. file is the path of the record r.
func (v *iscsiVolumes) checkISCSIConflict(file string, r iscsiRecord) error {
	others, err := v.iscsiRecordsOfTarget(file, r)
	if err != nil {
		return err
	}
	for other, o := range others {
		pod := filepath.Base(filepath.Dir(filepath.Dir(other)))
		switch {
		case o.LUN != r.LUN:
		case o.Block != r.Block:
			return fmt.Errorf("iSCSI target %s, LUN %d is in use on this node in another volumeMode, by pod %s: only "+
				"one volumeMode at a time is possible", r.Target, r.LUN, pod)
		case o.ReadOnly != r.ReadOnly:
			return fmt.Errorf("iSCSI target %s, LUN %d is in use on this node by pod %s, with readOnly: %t: all its "+
				"volumes must have the same readOnly", r.Target, r.LUN, pod, o.ReadOnly)
		}
	}
	return nil
}

// iscsiRecordsOfTarget returns the records of all other iSCSI volumes on the node with the same
// target as r. The keys are the paths of the records; file is the path of r.
func (v *iscsiVolumes) iscsiRecordsOfTarget(file string, r iscsiRecord) (map[string]iscsiRecord, error) {
	pods, err := v.Pods()
	if err != nil {
		return nil, err
	}
	out := map[string]iscsiRecord{}
	for _, p := range pods {
		recs, err := v.iscsiRecords(p)
		if err != nil {
			return nil, err
		}
		for other, o := range recs {
			if other != file && o.hasSameTarget(r) {
				out[other] = o
			}
		}
	}
	return out, nil
}

// isISCSIUntouched reports whether nothing was done on this node for the disk: its file system is
// not mounted, and the kernel has no device for it.
func (v *iscsiVolumes) isISCSIUntouched(s iscsiSource, r iscsiRecord) bool {
	is, err := isMountPoint(v.iscsiGlobalPath(r))
	if is || err != nil {
		return false
	}
	has, err := v.cfg.ISCSI.HasDisk(s.disk)
	return err == nil && !has
}

// attachISCSI returns the path of the device of an iSCSI disk on this node. It logs in to the
// target if necessary.
func (v *iscsiVolumes) attachISCSI(ctx context.Context, s iscsiSource, r iscsiRecord) (string, error) {
	login, err := v.iscsiLogin(s)
	if err != nil {
		return "", err
	}
	return v.cfg.ISCSI.Attach(ctx, s.disk, login, v.iscsiDir(r))
}

// diskTimeout bounds creating, repairing and mounting a file system on a remote disk. The kernel
// reports an unreachable server much earlier.
const diskTimeout = 20 * time.Minute

// mountISCSIGlobal mounts the disk's file system at the path that all pods of the node share. It
// does nothing if the file system is already mounted.
func (v *iscsiVolumes) mountISCSIGlobal(ctx context.Context, s iscsiSource, r iscsiRecord) error {
	global := v.iscsiGlobalPath(r)
	is, err := mountInfoAt(global)
	if err != nil {
		return err
	}
	if is != nil {
		if _, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d", is.Major, is.Minor)); err != nil {
			return fmt.Errorf("the disk that is mounted at %s is no longer attached to this node, for example after a "+
				"manual logout from its target: its pods must terminate first", global)
		}
		return nil
	}
	device, err := v.attachISCSI(ctx, s, r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(global, 0o750); err != nil {
		return err
	}
	m := disk.Mount{Device: device, Dir: global, Type: s.fsType, Flags: s.options}
	if s.readOnly {
		m.Flags = append(m.Flags[:len(m.Flags):len(m.Flags)], "ro")
	}
	ctx, cancel := context.WithTimeout(ctx, diskTimeout)
	defer cancel()
	if err := remote.Disk(ctx, m); err != nil {
		return fmt.Errorf("%s: %w", s.disk, err)
	}
	return nil
}

// mountInfoAt returns the entry of the mount table for a path, or nil if the path is not a mount
// point. It does not access the mounted file system.
func mountInfoAt(path string) (*mountinfo.Info, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(filepath.Join(dir, filepath.Base(path))))
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[len(found)-1], nil
}

// iscsiLogin returns the CHAP credentials in the secret that the volume refers to.
func (v *iscsiVolumes) iscsiLogin(s iscsiSource) (l iscsi.Login, err error) {
	if !s.discoveryCHAP && !s.sessionCHAP {
		return l, nil
	}
	if s.secret == nil {
		return l, errors.New("chapAuthDiscovery and chapAuthSession need a secret (secretRef)")
	}
	has, err := readSecret(v.cfg.Objects, s.secret)
	if err != nil {
		return l, err
	}
	read := func(wanted bool, prefix string, to *iscsi.Credentials) error {
		if !wanted {
			return nil
		}
		*to = iscsi.Credentials{User: has[prefix+"username"], Password: has[prefix+"password"],
			UserIn: has[prefix+"username_in"], PasswordIn: has[prefix+"password_in"]}
		for _, pair := range [][2]string{{to.User, to.Password}, {to.UserIn, to.PasswordIn}} {
			if (pair[0] == "") != (pair[1] == "") {
				return fmt.Errorf("secret %s/%s has a user name without its password, or the reverse (%susername, "+
					"%[3]spassword, and the same with _in)",
					s.secret.Namespace, s.secret.Name, prefix)
			}
		}
		if to.User == "" {
			return fmt.Errorf("secret %s/%s lacks %susername and %[3]spassword, which the volume needs",
				s.secret.Namespace, s.secret.Name, prefix)
		}
		return nil
	}
	return l, errors.Join(read(s.discoveryCHAP, "discovery.sendtargets.auth.", &l.Discovery),
		read(s.sessionCHAP, "node.session.auth.", &l.Session))
}

// releaseISCSI unmounts all iSCSI volumes of a pod, detaches the disks that no other pod uses, and
// removes the volumes' records.
func (v *iscsiVolumes) releaseISCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.iscsiRecords(uid)
	if err != nil {
		return err
	}
	if len(recs) > 0 {
		defer v.attachments.signalUses()
	}
	var errs []error
	for file, r := range recs {
		if err := v.releaseISCSIVolume(ctx, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *iscsiVolumes) releaseISCSIVolume(ctx context.Context, file string, r iscsiRecord) error {
	defer v.locks.Lock(r.lockKey())()
	place := strings.TrimSuffix(file, ".json")
	if err := unmountBelow(ctx, place); err != nil {
		return err
	}
	if err := removeMountPoint(place); err != nil {
		return err
	}
	others, err := v.iscsiRecordsOfTarget(file, r)
	if err != nil {
		return err
	}
	last := true // no other volume of the node uses the disk
	for _, o := range others {
		last = last && o.LUN != r.LUN
	}
	if last {
		global := v.iscsiGlobalPath(r)
		if is, err := isMountPoint(global); err != nil {
			return err
		} else if is {
			if err := remote.UnmountWhole(ctx, global); err != nil {
				return err
			}
		}
		if err := removeMountPoint(global); err != nil {
			return err
		}
		if err := v.cfg.ISCSI.Detach(ctx, v.iscsiDir(r), r.LUN, len(others) == 0); err != nil {
			return err
		}
	}
	if len(others) == 0 {
		for _, dir := range []string{v.iscsiDir(r), filepath.Dir(v.iscsiDir(r))} {
			_ = os.Remove(dir) // fails if it is not empty
		}
	}
	return os.Remove(file)
}

// removeMountPoint removes an empty folder. It returns an error if something is mounted there.
func removeMountPoint(path string) error {
	is, err := isMountPoint(path)
	if err != nil {
		return fmt.Errorf("cannot determine whether something is mounted at %s: %w", path, err)
	}
	if is {
		return fmt.Errorf("something is still mounted at %s", path)
	}
	return removeEmpty(path)
}
