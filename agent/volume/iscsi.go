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

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/volume/disk"
	"keelson.dev/keelson/agent/volume/iscsi"
	"keelson.dev/keelson/agent/volume/remote"
)

// iscsiSource is a disk of an iSCSI target as a pod asks for it, by a PersistentVolume or by itself.
type iscsiSource struct {
	disk            iscsi.Disk
	about           string // names the volume for messages, where the pod has it by a claim
	claimed         string // the PersistentVolume; "" where the pod names the disk itself
	fsType          string
	options         []string
	readOnly        bool // the disk is not written to
	reader          bool // the pod does not write to it
	block           bool
	discover, login bool // by what the secret has
	secret          *v1.SecretReference
}

// iscsiRecord is what is known of such a volume of a pod after a crash: written before the target is asked for anything.
type iscsiRecord struct {
	Version   int    `json:"version"`
	Target    string `json:"target"`
	Interface string `json:"interface"`
	LUN       int    `json:"lun"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	Block     bool   `json:"block,omitempty"`
	Attach    bool   `json:"attach,omitempty"` // it is attached to the node, which tells that it uses it
	// Secret is a salted hash of the credentials with which the pod logs in; empty in records of earlier agents and for
	// a claimed volume whose secret could not be read.
	Secret   string `json:"secret,omitempty"`
	LoggedIn bool   `json:"loggedIn,omitempty"` // the disk was there for the pod, so that its credentials were good
	Awaits   bool   `json:"awaits"`             // it has not been attached for the pod yet, and nothing was done for it
}

// handle is how the disk is called among attached volumes.
func (r iscsiRecord) handle() string { return fmt.Sprintf("%s:%d", r.Target, r.LUN) }

func (r iscsiRecord) sameTarget(o iscsiRecord) bool {
	return r.Target == o.Target && r.Interface == o.Interface
}

func (r iscsiRecord) lock() string { return "iscsi\x00" + r.Interface + "\x00" + r.Target }

// iscsiDir is the folder of a target and the interface by which it is reached.
func (v *Volumes) iscsiDir(r iscsiRecord) string {
	return filepath.Join(iscsiRoot(v.kubelet()), iscsi.Name(iscsi.Disk{Target: r.Target, Interface: r.Interface}))
}

// iscsiRoot is the folder of all targets, below kubelet's.
func iscsiRoot(kubelet string) string {
	return filepath.Join(kubelet, "plugins", "kubernetes.io", "iscsi")
}

// Remove takes away what volumes have made on the node beside mounts and files: sessions with iSCSI targets, their devices, and iscsiadm's
// records with the passwords in them. It is for a node that leaves its cluster, whose agent and pods have ended and whose volumes are
// unmounted; what is mounted still stays, and is named. What was there before volumes stays. kubelet is the folder of Paths.
func Remove(ctx context.Context, kubelet string, node iscsi.Node) error {
	return node.DetachAll(ctx, iscsiRoot(kubelet))
}

// iscsiGlobal is where the file system of a disk is mounted, once for all pods of the node.
func (v *Volumes) iscsiGlobal(r iscsiRecord) string {
	return filepath.Join(v.iscsiDir(r), fmt.Sprintf("lun-%d", r.LUN))
}

// inlineISCSI is a disk that a pod names itself.
func inlineISCSI(pod *v1.Pod, name string, s *v1.ISCSIVolumeSource) (iscsiSource, error) {
	d, err := iscsi.New(name, s.IQN, s.TargetPortal, s.Portals, s.Lun, s.ISCSIInterface, deref(s.InitiatorName))
	out := iscsiSource{disk: d, fsType: s.FSType, readOnly: s.ReadOnly, reader: s.ReadOnly, discover: s.DiscoveryCHAPAuth, login: s.SessionCHAPAuth}
	if s.SecretRef != nil {
		out.secret = &v1.SecretReference{Namespace: pod.Namespace, Name: s.SecretRef.Name}
	}
	return out, err
}

// claimedISCSI is the disk of a PersistentVolume.
func claimedISCSI(pod *v1.Pod, pv *v1.PersistentVolume, reader bool) (iscsiSource, error) {
	s := pv.Spec.ISCSI
	d, err := iscsi.New(pv.Name, s.IQN, s.TargetPortal, s.Portals, s.Lun, s.ISCSIInterface, deref(s.InitiatorName))
	out := iscsiSource{disk: d, about: fmt.Sprintf("persistentvolume %q: ", pv.Name), claimed: pv.Name, fsType: s.FSType, options: pv.Spec.MountOptions, readOnly: s.ReadOnly,
		reader: reader || s.ReadOnly, block: isBlock(pv), discover: s.DiscoveryCHAPAuth, login: s.SessionCHAPAuth}
	if s.SecretRef != nil {
		ref := *s.SecretRef
		if ref.Namespace == "" {
			ref.Namespace = pod.Namespace
		}
		out.secret = &ref
	}
	if err != nil {
		err = fmt.Errorf("%s%w", out.about, err)
	}
	return out, err
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// iscsi brings a disk to the node and shows it to a pod. What is there already is kept, and no server is asked for it.
func (v *Volumes) iscsi(ctx context.Context, pod *v1.Pod, name string, s iscsiSource) (agent.Mount, error) {
	fail := func(err error) (agent.Mount, error) { return agent.Mount{}, fmt.Errorf("%s%w", s.about, err) }
	r := iscsiRecord{Version: 1, Target: s.disk.Target, Interface: s.disk.Interface, LUN: s.disk.LUN, ReadOnly: s.readOnly, Block: s.block, Attach: s.claimed != ""}
	defer v.locks.Lock(r.lock())()
	place := filepath.Join(v.podDir(pod.UID), "iscsi", name)
	m := agent.Mount{HostPath: place, ReadOnly: s.reader, Block: s.block}
	if is, err := mounted(place); is && !s.block || err != nil {
		return m, err
	}
	file := place + ".json"
	if err := errors.Join(v.iscsiFree(file, r), v.iscsiShared(s, file, &r)); err != nil {
		return fail(err)
	}
	r.Awaits = r.Attach && awaits(file, func() bool { return v.iscsiUntouched(s, r) })
	if err := errors.Join(writeRecord(file, r), os.MkdirAll(v.iscsiDir(r), 0o750)); err != nil {
		return fail(err)
	}
	if r.Attach {
		if _, err := v.attached(ctx, source{name: s.claimed, driver: iscsiAttacher, handle: r.handle()}); err != nil {
			return agent.Mount{}, err
		}
	}
	if r.Awaits {
		r.Awaits = false
		if err := writeRecord(file, r); err != nil {
			return fail(err)
		}
		v.useChanged()
	}
	var err error
	if s.block {
		m.HostPath, err = v.iscsiDevice(ctx, s, r)
	} else if err = v.iscsiMount(ctx, s, r); err == nil {
		err = bind(v.iscsiGlobal(r), place)
	}
	if r.LoggedIn = true; err == nil {
		err = writeRecord(file, r)
	}
	if err != nil {
		return fail(err)
	}
	if !s.block && !s.reader && fsGroup(pod) != nil {
		if err := v.once(pod.UID, name, func() error { return applyGroup(place, pod) }); err != nil {
			return fail(err)
		}
	}
	return m, nil
}

// bind shows what is mounted at one place at another one.
func bind(from, at string) error {
	if err := os.MkdirAll(at, 0o750); err != nil {
		return err
	}
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s at %s: %w", from, at, err)
	}
	return nil
}

// iscsiFree says why a pod may not have a disk now: one of another pod of the node has it in a way that this does not go with.
func (v *Volumes) iscsiFree(file string, r iscsiRecord) error {
	others, err := v.iscsiUsers(file, r)
	if err != nil {
		return err
	}
	for other, o := range others {
		pod := filepath.Base(filepath.Dir(filepath.Dir(other)))
		switch {
		case o.LUN != r.LUN:
		case o.Block != r.Block:
			return fmt.Errorf("iSCSI target %s, LUN %d is in use on this node in another volumeMode, by pod %s: it has one at a time", r.Target, r.LUN, pod)
		case o.ReadOnly != r.ReadOnly:
			return fmt.Errorf("iSCSI target %s, LUN %d is in use on this node by pod %s, which has readOnly: %t: all that have it say the same", r.Target, r.LUN, pod, o.ReadOnly)
		}
	}
	return nil
}

// iscsiUsers are other volumes of the node's pods that are of the same target, by the path of their record.
func (v *Volumes) iscsiUsers(file string, r iscsiRecord) (map[string]iscsiRecord, error) {
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
			if other != file && o.sameTarget(r) {
				out[other] = o
			}
		}
	}
	return out, nil
}

// iscsiRecords lists the iSCSI volumes of a pod by the path of their record.
func (v *Volumes) iscsiRecords(uid types.UID) (map[string]iscsiRecord, error) {
	return recordsIn[iscsiRecord](filepath.Join(v.podDir(uid), "iscsi"), "an iSCSI volume")
}

// iscsiUntouched says that the node has nothing of a disk: no file system is mounted, and the kernel has no device of it.
func (v *Volumes) iscsiUntouched(s iscsiSource, r iscsiRecord) bool {
	is, err := mounted(v.iscsiGlobal(r))
	if is || err != nil {
		return false
	}
	has, err := v.cfg.ISCSI.Has(s.disk)
	return err == nil && !has
}

// iscsiDevice is the disk's device on this node, which is logged in to the target where it was not.
func (v *Volumes) iscsiDevice(ctx context.Context, s iscsiSource, r iscsiRecord) (string, error) {
	login, err := v.iscsiLogin(s)
	if err != nil {
		return "", err
	}
	return v.cfg.ISCSI.Attach(ctx, s.disk, login, v.iscsiDir(r))
}

// diskPatience bounds how long the file system of a server's disk is made, mended and mounted. A server that is gone is given up
// by the kernel long before.
const diskPatience = 20 * time.Minute

// iscsiMount mounts the disk's file system for all pods of the node, unless it is.
func (v *Volumes) iscsiMount(ctx context.Context, s iscsiSource, r iscsiRecord) error {
	global := v.iscsiGlobal(r)
	is, err := mountedFrom(global)
	if err != nil {
		return err
	}
	if is != nil {
		if _, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d", is.Major, is.Minor)); err != nil {
			return fmt.Errorf("the disk that is mounted at %s is gone from this node, as when somebody logged out of its target: its pods have to end first", global)
		}
		return nil
	}
	device, err := v.iscsiDevice(ctx, s, r)
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
	ctx, cancel := context.WithTimeout(ctx, diskPatience)
	defer cancel()
	if err := remote.Disk(ctx, m); err != nil {
		return fmt.Errorf("%s: %w", s.disk, err)
	}
	return nil
}

// mountedFrom is what is mounted at a place, nil for nothing. It is not touched.
func mountedFrom(path string) (*mountinfo.Info, error) {
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

// iscsiLogin is what the volume's secret has to prove.
func (v *Volumes) iscsiLogin(s iscsiSource) (l iscsi.Login, err error) {
	if !s.discover && !s.login {
		return l, nil
	}
	if s.secret == nil {
		return l, errors.New("chapAuthDiscovery and chapAuthSession take a secret (secretRef)")
	}
	has, err := v.driverSecret(s.secret)
	if err != nil {
		return l, err
	}
	read := func(wanted bool, prefix string, to *iscsi.Credentials) error {
		if !wanted {
			return nil
		}
		*to = iscsi.Credentials{User: has[prefix+"username"], Password: has[prefix+"password"], UserIn: has[prefix+"username_in"], PasswordIn: has[prefix+"password_in"]}
		for _, pair := range [][2]string{{to.User, to.Password}, {to.UserIn, to.PasswordIn}} {
			if (pair[0] == "") != (pair[1] == "") {
				return fmt.Errorf("secret %s/%s has one of a user name and its password (%susername, %[3]spassword, and the same with _in), and not the other",
					s.secret.Namespace, s.secret.Name, prefix)
			}
		}
		if to.User == "" {
			return fmt.Errorf("secret %s/%s has no %susername and %[3]spassword, which the volume asks for", s.secret.Namespace, s.secret.Name, prefix)
		}
		return nil
	}
	return l, errors.Join(read(s.discover, "discovery.sendtargets.auth.", &l.Discovery), read(s.login, "node.session.auth.", &l.Session))
}

// releaseISCSI takes the pod's iSCSI volumes away, and from the node those that no other pod has.
func (v *Volumes) releaseISCSI(ctx context.Context, uid types.UID) error {
	recs, err := v.iscsiRecords(uid)
	if err != nil {
		return err
	}
	if len(recs) > 0 {
		defer v.useChanged()
	}
	var errs []error
	for file, r := range recs {
		if err := v.leaveISCSI(ctx, file, r); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) leaveISCSI(ctx context.Context, file string, r iscsiRecord) error {
	defer v.locks.Lock(r.lock())()
	place := strings.TrimSuffix(file, ".json")
	if err := unmountBelow(ctx, place); err != nil {
		return err
	}
	if err := removeMountPoint(place); err != nil {
		return err
	}
	others, err := v.iscsiUsers(file, r)
	if err != nil {
		return err
	}
	last := true // to use the disk
	for _, o := range others {
		last = last && o.LUN != r.LUN
	}
	if last {
		global := v.iscsiGlobal(r)
		if is, err := mounted(global); err != nil {
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
			_ = os.Remove(dir) // it stays where it is not empty
		}
	}
	return os.Remove(file)
}

// removeMountPoint removes an empty folder at which nothing is mounted.
func removeMountPoint(path string) error {
	is, err := mounted(path)
	if err != nil {
		return fmt.Errorf("nobody knows whether something is mounted at %s: %w", path, err)
	}
	if is {
		return fmt.Errorf("something is mounted at %s still", path)
	}
	return removeEmpty(path)
}
