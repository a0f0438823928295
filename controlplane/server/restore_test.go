package server_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typedstoragev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// Backups are restored repeatedly and in both orders. No revision is assigned twice, and watches
// from revisions that were assigned before a restore get 410.
func TestRestoresInARow(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
	older := p.Backup("cp1")
	p.PutConfigMap("cp1", "b")
	younger := p.Backup("cp1")
	seen := uint64(0)
	for i, file := range []string{younger, older, older, younger} {
		p.Restore("cp1", file)
		if held := strconv.FormatUint(seen, 10); seen > 0 {
			w, err := p.Client("cp1").CoreV1().ConfigMaps("default").Watch(context.Background(),
				metav1.ListOptions{ResourceVersion: held})
			if err == nil {
				e := <-w.ResultChan()
				w.Stop()
				err = apierrors.FromObject(e.Object)
			}
			if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				t.Errorf("restore %d: a watch from a revision before the restore: %v, want 410", i, err)
			}
		}
		for n := range 20 {
			rev, err := strconv.ParseUint(p.PutConfigMap("cp1", fmt.Sprint("c-", n)).ResourceVersion, 10, 63)
			if err != nil || n == 0 && rev <= seen {
				t.Errorf("restore %d: a write has revision %d, error %v; %d was assigned before", i,
					rev, err, seen)
			}
			seen = max(seen, rev)
		}
	}
}

// A restore is refused while other replicas run, because it would create a second cluster with the
// same keys.
func TestRestoreWhileOthersRun(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
	file := p.Backup("cp1")
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	members, err := cfg.Dir().Members()
	if err != nil {
		t.Fatal(err)
	}
	members["cp2"] = l.Addr().String()
	if err := datadir.WriteJSON(filepath.Join(cfg.DataDir, datadir.MembersFile), members); err != nil {
		t.Fatal(err)
	}
	r, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true})
	if !errors.Is(err, recovery.ErrOthersRun) || !strings.Contains(err.Error(), "cp2") || r.MovedTo != "" {
		t.Errorf("while cp2 runs: %v, moved %q", err, r.MovedTo)
	}
	if _, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true, LeaveOthers: true}); err !=
		nil {
		t.Errorf("with --leave-others-behind: %v", err)
	}
	if err := datadir.WriteJSON(filepath.Join(cfg.DataDir, datadir.MembersFile), members); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Errorf("after cp2 was stopped: %v", err)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "a")
}

// Revocations after a backup remain effective after its restore: nodes that were revoked by name or
// by the deletion of their Nodes. Join tokens of the backup are invalid, because they may have been
// used.
func TestRestoreKeepsRevocations(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	asNode := map[string]func() error{}
	for _, name := range []string{"w1", "w2", "w3"} {
		if _, err := p.Client("cp1").CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		issued, err := p.Trust.CA.Issue(pki.Client(api.NodeUserPrefix+name, api.GroupNodes), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		cfg := rest.AnonymousClientConfig(p.RESTConfig("cp1"))
		cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
		asNode[name] = func() error {
			_, err := servertest.NewClient(t, cfg).CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			return err
		}
		if err := asNode[name](); err != nil {
			t.Fatal(err)
		}
	}
	p.createNodeToken(t)
	file := p.Backup("cp1")
	if err := p.Call("cp1", "POST", api.PathClusterRevoke, api.ClusterRevoke{Node: "w3"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Client("cp1").CoreV1().Nodes().Delete(ctx, "w2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"w2", "w3"} {
		servertest.Eventually(t, func() error {
			if err := asNode[name](); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("%s with a revoked certificate: %v", name, err)
			}
			return nil
		})
	}
	p.StopReplica("cp1")
	r, err := recovery.Restore(p.Members["cp1"].Config.Dir(), file, recovery.RestoreOptions{Replace: true})
	if err != nil || r.Unread != nil || strings.Join(r.Revoked, " ") != "w2 w3" || r.Tokens == 0 {
		t.Errorf("copied: %q, %d tokens, unread %v, error %v", r.Revoked, r.Tokens, r.Unread, err)
	}
	p.Restart("cp1")
	p.AwaitReady("cp1")
	for name, shut := range map[string]bool{"w1": false, "w2": true, "w3": true} {
		if err := asNode[name](); apierrors.IsUnauthorized(err) != shut || !shut && err != nil {
			t.Errorf("%s after the restore: %v", name, err)
		}
	}
	revocations, err := p.Client("cp1").CoreV1().Secrets("kube-system").List(ctx,
		metav1.ListOptions{FieldSelector: "type=" + string(pki.RevocationSecretType)})
	if err != nil || len(revocations.Items) != 2 {
		t.Errorf("revocations after the restore: %d, error %v", len(revocations.Items), err)
	}
	for _, s := range revocations.Items {
		if r, _ := pki.ParseRevocation(&s); r.UID != "" || r.Named != (r.Node == "w3") {
			t.Errorf("copied revocation: %+v", r) // with a UID, the restored Node could not be revoked again
		}
	}
	secrets, err := p.Client("cp1").CoreV1().Secrets("kube-system").List(ctx,
		metav1.ListOptions{FieldSelector: "type=" + string(pki.TokenSecretType)})
	if err != nil || len(secrets.Items) > 0 {
		t.Errorf("tokens after the restore: %d, error %v", len(secrets.Items), err)
	}

	// The restore is repeated after it was interrupted when the previous data had been moved aside.
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	conf, err := cfg.Dir().OfflineStoreConfig(p.Cluster)
	if err == nil {
		_, err = disk.SetAside(conf.Disk())
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, err = recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{}); err != nil || r.Unread == nil ||
		strings.Join(r.Revoked, " ") != "w2 w3" {
		t.Errorf("copied from the data that was moved aside: %q, unread %v, error %v", r.Revoked, r.Unread, err)
	}
}

// After a restore and after a recovery, no Node has attached volumes, all Nodes are unconfirmed,
// and drivers attach again, because another node may have the volume. F110
func TestRestoreResetsVolumes(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx, name := context.Background(), api.AttachedVolumeName("disk.example", "h")
	nodes, attachments := p.Client("cp1").CoreV1().Nodes(), p.Client("cp1").StorageV1().VolumeAttachments()
	volumes := p.Client("cp1").CoreV1().PersistentVolumes()
	attach := func() { t.Helper(); attachVolume(t, name, nodes, attachments) }
	checkReset := func(after string) {
		t.Helper()
		for _, w := range []string{"w1", "w2"} {
			n, err := nodes.Get(ctx, w, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if len(n.ManagedFields) == 0 {
				t.Errorf("after %s the fields of %s have no managers", after, w)
			}
			if !api.IsUnconfirmed(n) || len(n.Status.VolumesAttached) > 0 || len(n.Status.VolumesInUse) != 1 ||
				n.Labels["is"] != w {
				t.Errorf("after %s: %+v", after, n)
			}
			taint := func(key string) bool {
				return slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == key })
			}
			_, claims := n.Annotations[api.AnnotationClaimsHeld]
			if _, tells := n.Annotations[api.AnnotationVolumesHeld]; tells || claims ||
				taint(v1.TaintNodeOutOfService) || !taint("own") {
				t.Errorf("after %s %s reports volumes (%v, %v) or is out of service: %v", after, w, tells,
					claims, n.Spec.Taints)
			}
		}
		if a, err := attachments.Get(ctx, "a", metav1.GetOptions{}); err != nil || a.Status.Attached ||
			len(a.Status.AttachmentMetadata) > 0 || a.Spec.NodeName != "w1" {
			t.Errorf("after %s: %v, error %v", after, a, err)
		}
	}
	checkUnconfirmed := func(after string) {
		t.Helper()
		for name, want := range map[string]bool{"one": true, "many": false, "folder": false, "sole": true} {
			v, err := volumes.Get(ctx, name, metav1.GetOptions{})
			if err != nil || api.IsUnconfirmed(v) != want {
				t.Errorf("after %s volume %s is marked %v, want %v; error %v", after, name, !want, want, err)
			}
			if _, err := volumes.Patch(ctx, name, types.MergePatchType,
				fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnconfirmed),
				metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	createVolumes(t, volumes)
	attach()
	file := p.Backup("cp1")
	if _, err := nodes.Create(ctx,
		&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w3", Labels: map[string]string{"is": "w3"}},
			Spec: v1.NodeSpec{PodCIDR: "10.9.8.0/24", PodCIDRs: []string{"10.9.8.0/24"}}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.StopReplica("cp1")
	r, err := recovery.Restore(p.Members["cp1"].Config.Dir(), file, recovery.RestoreOptions{Replace: true})
	if err != nil || !slices.Equal(r.Joined, []string{"w3"}) || r.Unread != nil {
		t.Errorf("joined after the backup: %v, unread %v, error %v", r.Joined, r.Unread, err)
	}
	p.Restart("cp1")
	p.AwaitReady("cp1")
	checkReset("a restore")
	checkUnconfirmed("a restore")
	if n, err := nodes.Get(ctx, "w3", metav1.GetOptions{}); err != nil || !api.IsUnconfirmed(n) ||
		n.Labels["is"] != "w3" || n.Spec.PodCIDR == "10.9.8.0/24" {
		t.Errorf("a node that joined after the backup: %+v, error %v", n, err)
	}
	attach()
	p.StopReplica("cp1")
	if _, err := recovery.Recover(p.Members["cp1"].Config.Dir(), true); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp1")
	p.AwaitReady("cp1")
	checkReset("a recovery")
	checkUnconfirmed("a recovery")
}

// attachVolume makes two nodes report a volume as in use, and marks an attachment as attached.
// Existing objects are updated.
func attachVolume(
	t *testing.T, name v1.UniqueVolumeName, nodes typedv1.NodeInterface,
	attachments typedstoragev1.VolumeAttachmentInterface,
) {
	t.Helper()
	ctx := context.Background()
	for _, w := range []string{"w1", "w2"} {
		n, err := nodes.Create(ctx,
			&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: w, Labels: map[string]string{"is": w}}},
			metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			n, err = nodes.Get(ctx, w, metav1.GetOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		patch := fmt.Appendf(nil,
			`{"metadata":{"annotations":{%q:null,%q:"[]",%q:"[]"}},"spec":{"taints":[{"key":%q,"effect":"NoExecute"},`+
				`{"key":"own","effect":"NoSchedule"}]}}`,
			api.AnnotationUnconfirmed, api.AnnotationVolumesHeld, api.AnnotationClaimsHeld, v1.TaintNodeOutOfService)
		if _, err = nodes.Patch(ctx, n.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		status := fmt.Appendf(nil, `{"status":{"volumesInUse":[%q],"volumesAttached":[{"name":%q,"devicePath":""}]}}`,
			name, name)
		if _, err = nodes.Patch(ctx, n.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err !=
			nil {
			t.Fatal(err)
		}
	}
	volume := "v"
	a := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: "other.example", NodeName: "w1",
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume}}}
	a, err := attachments.Create(ctx, a, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		a, err = attachments.Get(ctx, "a", metav1.GetOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	a.Status.Attached, a.Status.AttachmentMetadata = true, map[string]string{"at": "/dev/a"}
	if _, err = attachments.UpdateStatus(ctx, a, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// createVolumes creates volumes for one node and for many, and volumes that are not attached, one
// of them for a single pod.
func createVolumes(t *testing.T, to typedv1.PersistentVolumeInterface) {
	t.Helper()
	for name, mode := range map[string]v1.PersistentVolumeAccessMode{"one": v1.ReadWriteOnce, "many": v1.ReadWriteMany,
		"folder": v1.ReadWriteOnce, "sole": v1.ReadWriteOncePod} {
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PersistentVolumeSpec{AccessModes: []v1.PersistentVolumeAccessMode{mode},
				Capacity: v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}}}
		pv.Spec.CSI = &v1.CSIPersistentVolumeSource{Driver: "other.example", VolumeHandle: name}
		if name == "folder" || name == "sole" {
			pv.Spec.CSI, pv.Spec.NFS = nil, &v1.NFSVolumeSource{Server: "192.0.2.1", Path: "/a"}
		}
		if _, err := to.Create(t.Context(), pv, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// createNodeToken creates a join token.
func (p *plane) createNodeToken(t *testing.T) {
	t.Helper()
	if err := p.Call("cp1", "POST", api.PathClusterTokens, api.ClusterToken{Role: string(pki.RoleNode)}, nil); err !=
		nil {
		t.Fatal(err)
	}
}
