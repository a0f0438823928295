package server

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
	"keelson.dev/keelson/raftstore/disk"
)

// restored restores a backup over the data of a replica, which is started again.
func (p *plane) restored(name, file string) {
	p.t.Helper()
	p.stop(name)
	if _, err := recovery.Restore(p.members[name].cfg.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		p.t.Fatal(err)
	}
	p.again(name)
	p.ready(name)
}

// One backup is restored after another, the older after the younger and one twice: no revision is handed out a second time,
// and what clients hold of the time between is 410, not the beginning of a silence.
func TestRestoresInARow(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	older := p.backup("cp1")
	p.put("cp1", "b")
	younger := p.backup("cp1")
	seen := uint64(0)
	for i, file := range []string{younger, older, older, younger} {
		p.restored("cp1", file)
		if held := strconv.FormatUint(seen, 10); seen > 0 {
			w, err := p.client("cp1").CoreV1().ConfigMaps("default").Watch(context.Background(), metav1.ListOptions{ResourceVersion: held})
			if err == nil {
				e := <-w.ResultChan()
				w.Stop()
				err = apierrors.FromObject(e.Object)
			}
			if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				t.Errorf("restore %d: a watch from what a client held of the time before: %v, want 410", i, err)
			}
		}
		for n := range 20 {
			rev, err := strconv.ParseUint(p.put("cp1", fmt.Sprint("c-", n)).ResourceVersion, 10, 63)
			if err != nil || n == 0 && rev <= seen {
				t.Errorf("restore %d: a write has revision %d, error %v; %d was handed out before it", i, rev, err, seen)
			}
			seen = max(seen, rev)
		}
	}
}

// Nothing is restored beside replicas that run: the cluster would be there twice, with the same keys.
func TestRestoreWhileOthersAnswer(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	file := p.backup("cp1")
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
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
	if !errors.Is(err, recovery.ErrOthersRun) || !strings.Contains(err.Error(), "cp2") || r.Moved != "" {
		t.Errorf("while cp2 answers: %v, moved %q", err, r.Moved)
	}
	if _, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true, Beside: true}); err != nil {
		t.Errorf("where cp2 is to be left behind: %v", err)
	}
	if err := datadir.WriteJSON(filepath.Join(cfg.DataDir, datadir.MembersFile), members); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Errorf("when cp2 is stopped: %v", err)
	}
	p.again("cp1")
	p.holds("cp1", "a")
}

// Who was shut out after a backup was made stays so when it is restored: nodes that were revoked by name, or by the deletion of
// their Nodes, and tokens, which may have been used.
func TestRestoreBringsNobodyBack(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	asNode := map[string]func() error{}
	for _, name := range []string{"w1", "w2", "w3"} {
		if _, err := p.client("cp1").CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		issued, err := p.ca.CA.Issue(pki.Client(api.NodeUserPrefix+name, api.GroupNodes), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		cfg := rest.AnonymousClientConfig(p.rest("cp1"))
		cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
		asNode[name] = func() error {
			_, err := mustClient(t, cfg).CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			return err
		}
		if err := asNode[name](); err != nil {
			t.Fatal(err)
		}
	}
	p.nodeToken(t)
	file := p.backup("cp1")
	if err := p.call("cp1", "POST", api.PathClusterRevoke, api.ClusterRevoke{Node: "w3"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.client("cp1").CoreV1().Nodes().Delete(ctx, "w2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"w2", "w3"} {
		eventually(t, func() error {
			if err := asNode[name](); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("%s with a revoked certificate: %v", name, err)
			}
			return nil
		})
	}
	p.stop("cp1")
	r, err := recovery.Restore(p.members["cp1"].cfg.Dir(), file, recovery.RestoreOptions{Replace: true})
	if err != nil || r.Unread != nil || strings.Join(r.Revoked, " ") != "w2 w3" || r.Tokens == 0 {
		t.Errorf("carried over: %q, %d tokens, unread %v, error %v", r.Revoked, r.Tokens, r.Unread, err)
	}
	p.again("cp1")
	p.ready("cp1")
	for name, shut := range map[string]bool{"w1": false, "w2": true, "w3": true} {
		if err := asNode[name](); apierrors.IsUnauthorized(err) != shut || !shut && err != nil {
			t.Errorf("%s after the restore: %v", name, err)
		}
	}
	revocations, err := p.client("cp1").CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{FieldSelector: "type=" + string(pki.RevocationSecretType)})
	if err != nil || len(revocations.Items) != 2 {
		t.Errorf("revocations after the restore: %d, error %v", len(revocations.Items), err)
	}
	for _, s := range revocations.Items {
		if r, _ := pki.RevocationOf(&s); r.UID != "" || r.Named != (r.Node == "w3") {
			t.Errorf("carried over: %+v", r) // by its UID the Node that is there again could not be revoked once more
		}
	}
	secrets, err := p.client("cp1").CoreV1().Secrets("kube-system").List(ctx, metav1.ListOptions{FieldSelector: "type=" + string(pki.TokenSecretType)})
	if err != nil || len(secrets.Items) > 0 {
		t.Errorf("tokens after the restore: %d, error %v", len(secrets.Items), err)
	}

	// Cut short after the previous data was moved aside, it is called again.
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	conf, err := cfg.Dir().OfflineStoreConfig(p.cluster)
	if err == nil {
		_, err = disk.SetAside(conf.Disk())
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, err = recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{}); err != nil || r.Unread == nil || strings.Join(r.Revoked, " ") != "w2 w3" {
		t.Errorf("carried over from what was moved aside: %q, unread %v, error %v", r.Revoked, r.Unread, err)
	}
}

// After a restore and after a recovery no node is told that it has a volume, all are to be heard first, and drivers attach anew:
// another node may have it since. F110
func TestVolumesAreGivenAnewAfterARestore(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx, name := context.Background(), api.AttachedName("disk.example", "h")
	nodes, attachments := p.client("cp1").CoreV1().Nodes(), p.client("cp1").StorageV1().VolumeAttachments()
	volumes := p.client("cp1").CoreV1().PersistentVolumes()
	has := func() { t.Helper(); useVolume(t, name, nodes, attachments) }
	forgotten := func(after string) {
		t.Helper()
		for _, w := range []string{"w1", "w2"} {
			n, err := nodes.Get(ctx, w, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if len(n.ManagedFields) == 0 {
				t.Errorf("after %s nobody manages fields of %s", after, w)
			}
			if !api.Unheard(n) || len(n.Status.VolumesAttached) > 0 || len(n.Status.VolumesInUse) != 1 || n.Labels["is"] != w {
				t.Errorf("after %s: %+v", after, n)
			}
			taint := func(key string) bool {
				return slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == key })
			}
			_, claims := n.Annotations[api.AnnotationClaimsHeld]
			if _, tells := n.Annotations[api.AnnotationVolumesHeld]; tells || claims || taint(v1.TaintNodeOutOfService) || !taint("own") {
				t.Errorf("after %s %s says what it has (%v, %v), or counts as dead: %v", after, w, tells, claims, n.Spec.Taints)
			}
		}
		if a, err := attachments.Get(ctx, "a", metav1.GetOptions{}); err != nil || a.Status.Attached || len(a.Status.AttachmentMetadata) > 0 || a.Spec.NodeName != "w1" {
			t.Errorf("after %s: %v, error %v", after, a, err)
		}
	}
	marked := func(after string) {
		t.Helper()
		for name, want := range map[string]bool{"one": true, "many": false, "folder": false, "sole": true} {
			v, err := volumes.Get(ctx, name, metav1.GetOptions{})
			if err != nil || api.Unheard(v) != want {
				t.Errorf("after %s volume %s is marked %v, want %v; error %v", after, name, !want, want, err)
			}
			if _, err := volumes.Patch(ctx, name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnheard), metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	volumesForOne(t, volumes)
	has()
	file := p.backup("cp1")
	if _, err := nodes.Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w3", Labels: map[string]string{"is": "w3"}}, Spec: v1.NodeSpec{PodCIDR: "10.9.8.0/24", PodCIDRs: []string{"10.9.8.0/24"}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.stop("cp1")
	r, err := recovery.Restore(p.members["cp1"].cfg.Dir(), file, recovery.RestoreOptions{Replace: true})
	if err != nil || !slices.Equal(r.Joined, []string{"w3"}) || r.Unread != nil {
		t.Errorf("joined since: %v, unread %v, error %v", r.Joined, r.Unread, err)
	}
	p.again("cp1")
	p.ready("cp1")
	forgotten("a restore")
	marked("a restore")
	if n, err := nodes.Get(ctx, "w3", metav1.GetOptions{}); err != nil || !api.Unheard(n) || n.Labels["is"] != "w3" || n.Spec.PodCIDR == "10.9.8.0/24" {
		t.Errorf("a node that joined since: %+v, error %v", n, err)
	}
	has()
	p.stop("cp1")
	if _, err := recovery.Recover(p.members["cp1"].cfg.Dir(), true); err != nil {
		t.Fatal(err)
	}
	p.again("cp1")
	p.ready("cp1")
	forgotten("a recovery")
	marked("a recovery")
}

// useVolume has two nodes say that they use a volume, and an attachment that it is attached. What is there already is written again.
func useVolume(t *testing.T, name v1.UniqueVolumeName, nodes typedv1.NodeInterface, attachments typedstoragev1.VolumeAttachmentInterface) {
	t.Helper()
	ctx := context.Background()
	for _, w := range []string{"w1", "w2"} {
		n, err := nodes.Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: w, Labels: map[string]string{"is": w}}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			n, err = nodes.Get(ctx, w, metav1.GetOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null,%q:"[]",%q:"[]"}},"spec":{"taints":[{"key":%q,"effect":"NoExecute"},{"key":"own","effect":"NoSchedule"}]}}`,
			api.AnnotationUnheard, api.AnnotationVolumesHeld, api.AnnotationClaimsHeld, v1.TaintNodeOutOfService)
		if _, err = nodes.Patch(ctx, n.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		status := fmt.Appendf(nil, `{"status":{"volumesInUse":[%q],"volumesAttached":[{"name":%q,"devicePath":""}]}}`, name, name)
		if _, err = nodes.Patch(ctx, n.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
	}
	volume := "v"
	a := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: storagev1.VolumeAttachmentSpec{Attacher: "other.example", NodeName: "w1",
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

// volumesForOne makes volumes for one node, for many, and such that are not attached, one of them for one pod.
func volumesForOne(t *testing.T, to typedv1.PersistentVolumeInterface) {
	t.Helper()
	for name, mode := range map[string]v1.PersistentVolumeAccessMode{"one": v1.ReadWriteOnce, "many": v1.ReadWriteMany, "folder": v1.ReadWriteOnce, "sole": v1.ReadWriteOncePod} {
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{AccessModes: []v1.PersistentVolumeAccessMode{mode},
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

// nodeToken makes a join token.
func (p *plane) nodeToken(t *testing.T) {
	t.Helper()
	if err := p.call("cp1", "POST", api.PathClusterTokens, api.ClusterToken{Role: string(pki.RoleNode)}, nil); err != nil {
		t.Fatal(err)
	}
}
