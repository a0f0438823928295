package outage

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/test/testenv"
)

var rewrite = flag.Bool("rewrite", false, "overwrite the transcript in testdata with the current output")

// claimQuestion is a query of a user about a claim that cannot be provisioned or used.
type claimQuestion struct {
	title, claim string
	until        string // text in the output of "kctl why" once the problem is known
}

// kctlOutput returns the output of a command. The command may fail because the object has a
// problem.
func (a attachTest) kctlOutput(args ...string) string {
	a.Helper()
	out, err := testenv.Try(a, filepath.Join(testenv.Lab().Config.BinDir, "kctl"),
		append([]string{"-n", a.ns}, args...)...)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		a.Fatal(err)
	}
	return out
}

// compareAnswers compares the output for claims with testdata/claims.txt.
func (a attachTest) compareAnswers(has *v1.Pod, other string, questions []claimQuestion) {
	a.Helper()
	const file = "testdata/claims.txt"
	var claim *v1.PersistentVolumeClaim
	testenv.Eventually(a, soon, func() (err error) {
		claim, err = a.cs.CoreV1().PersistentVolumeClaims(a.ns).Get(context.Background(), "data-"+has.Name,
			metav1.GetOptions{})
		return err
	})
	names := strings.NewReplacer(a.ns, "NAMESPACE", claim.Spec.VolumeName, "VOLUME", "node "+has.Spec.NodeName,
		"node HAS", "node/"+has.Spec.NodeName, "node/HAS", "node "+other, "node OTHER",
		api.AttachmentName(claim.Spec.VolumeName, driverName, other), "ATTACHMENT")
	ask := func(q claimQuestion) string {
		var b strings.Builder
		fmt.Fprintf(&b, "# %s\n", q.title)
		for _, args := range [][]string{{"why", "pvc/" + q.claim}, {"describe", "pvc", q.claim}} {
			out := a.kctlOutput(args...)
			fmt.Fprintf(&b, "$ kctl %s\n%s\n", strings.Join(args, " "), normalizeOutput(names.Replace(out)))
		}
		return b.String()
	}
	var all strings.Builder
	for _, q := range questions {
		testenv.Eventually(a, soon, func() error {
			if out := a.kctlOutput("why", "pvc/"+q.claim); !strings.Contains(out, q.until) {
				return fmt.Errorf("%s: no %q in %s", q.title, q.until, out)
			}
			return nil
		})
		if *rewrite {
			all.WriteString(ask(q) + "\n")
		}
	}
	if *rewrite {
		if err := os.WriteFile(file, []byte(all.String()), 0o644); err != nil {
			a.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		a.Fatal(err)
	}
	for _, q := range questions { // events of several controllers come in no order
		testenv.Eventually(a, soon, func() error {
			if got := ask(q); !strings.Contains(string(want), got) {
				return errors.New("the transcript differs (-rewrite writes " + file + "):\n" + got)
			}
			return nil
		})
	}
}

// varying lists the parts of the output that differ from run to run.
var varying = []struct {
	form *regexp.Regexp
	word string
}{
	{regexp.MustCompile(`, since \d+\w+`), ", since AGE"},
	{regexp.MustCompile(`(?m)^(  (?:Normal|Warning) +\S+ +)\d\S*(?: \(x\d+ over \S+\))?( +)`), "${1}AGE${2}"},
	{regexp.MustCompile(`on node \S+ is asked`), "on node NODE is asked"},
	{regexp.MustCompile(`node":"w\d+"`), `node":"NODE"`},
	{regexp.MustCompile(`\(combined from similar events\): `), ""},
	{regexp.MustCompile(`volume pvc-\S+ wants (\d+) MiB, and node \S+ has \d+ MiB`),
		"volume NAME wants $1 MiB, and node NODE has SOME MiB"},
	{regexp.MustCompile(`00-[0-9a-f]{32}-[0-9a-f]{16}-01`), "TRACE"},
	{regexp.MustCompile(`(\S) {2,}`), "$1  "},
	{regexp.MustCompile(`(?m) +$`), ""},
}

// normalizeOutput returns an output without variable parts, with its events sorted.
func normalizeOutput(out string) string {
	for _, v := range varying {
		out = v.form.ReplaceAllString(out, v.word)
	}
	var lines, events []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "  Normal ") || strings.HasPrefix(line, "  Warning ") {
			events = append(events, line)
		} else {
			lines = append(lines, line)
		}
	}
	slices.Sort(events)
	return strings.Join(append(lines, slices.Compact(events)...), "")
}

// createUnprovisionable creates claims that cannot be provisioned: their class or its driver does
// not exist, or they are too large. A pod uses the last of them.
func (a attachTest) createUnprovisionable() {
	a.Helper()
	ctx, now := context.Background(), storagev1.VolumeBindingImmediate
	if _, err := a.cs.StorageV1().CSIDrivers().Create(ctx,
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "absent.csi.example",
			Annotations: map[string]string{"keelson.dev/served-by": "agent"}}}, metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { _ = a.cs.StorageV1().CSIDrivers().Delete(ctx, "absent.csi.example", metav1.DeleteOptions{}) })
	for name, provisioner := range map[string]string{"nobodys": "absent.csi.example",
		"at-once": "local.csi.keelson.dev"} {
		if _, err := a.cs.StorageV1().StorageClasses().Create(ctx,
			&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner,
				VolumeBindingMode: &now}, metav1.CreateOptions{}); err != nil {
			a.Fatal(err)
		}
		a.Cleanup(func() { _ = a.cs.StorageV1().StorageClasses().Delete(ctx, name, metav1.DeleteOptions{}) })
	}
	for name, class := range map[string]string{"classless": "none-such", "driverless": "nobodys", "vast": "at-once",
		"unplaced": "standard"} {
		if _, err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Create(ctx,
			&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeClaimSpec{
				StorageClassName: &class, AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				Resources: v1.VolumeResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Pi")}}}},
			metav1.CreateOptions{}); err != nil {
			a.Fatal(err)
		}
	}
	if _, err := a.cs.CoreV1().Pods(a.ns).Create(ctx, claimPod("unplaced", "unplaced"), metav1.CreateOptions{}); err !=
		nil {
		a.Fatal(err)
	}
}

// checkFailedSources creates claims with sources that do not exist, and queries their state.
func (a attachTest) checkFailedSources(has *v1.Pod, other string) {
	a.Helper()
	ctx, class := context.Background(), "attached"
	a.createUnprovisionable()
	group := func(name string) *string { return &name }
	claims := a.cs.CoreV1().PersistentVolumeClaims(a.ns)
	for _, c := range []struct {
		name   string
		source v1.TypedObjectReference
	}{
		{"copy", v1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "nothing"}},
		{"restored", v1.TypedObjectReference{APIGroup: group("snapshot.storage.k8s.io"), Kind: "VolumeSnapshot",
			Name: "nothing"}},
		{"filled", v1.TypedObjectReference{APIGroup: group("example.com"), Kind: "Page", Name: "home"}},
	} {
		if _, err := claims.Create(ctx, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: c.name},
			Spec: v1.PersistentVolumeClaimSpec{
				StorageClassName: &class, AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				DataSourceRef: &c.source,
				Resources: v1.VolumeResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("8Mi")}}}},
			metav1.CreateOptions{}); err != nil {
			a.Fatal(err)
		}
	}
	a.compareAnswers(has, other, []claimQuestion{
		{"wanted by a pod on another node", "data-" + has.Name, "Multi-Attach"},
		{"a copy of a claim that is not there", "copy", "cannot be read"},
		{"of a snapshot, in a cluster without", "restored", "kctl snapshot install"},
		{"of what nobody knows", "filled", "does not serve this kind"},
		{"of a class that is not there", "classless", "not found"},
		{"of a driver that no node has", "driverless", "no node has CSI driver"},
		{"larger than any disk", "vast", "ResourceExhausted"},
		{"larger than any disk, for a pod", "unplaced", "did not have enough free storage"},
	})
	if out := a.kctlOutput("patch", "pvc", "data-"+has.Name, "-p",
		`{"spec": {"resources": {"requests": {"storage": "4Mi"}}}}`); !strings.Contains(out,
		"spec.resources.requests.storage: Forbidden: field can not be less than status.capacity: volumes do not "+
			"shrink; ask for more than the claim has, "+
			"or make a smaller claim and copy the data") {
		a.Errorf("the output for a claim that is to shrink: %s", out)
	}
	if err := a.cs.CoreV1().Pods(a.ns).Delete(ctx, "unplaced", metav1.DeleteOptions{}); err != nil {
		a.Error(err)
	}
	for _, name := range []string{"copy", "restored", "filled", "classless", "driverless", "vast", "unplaced"} {
		if err := claims.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			a.Error(err)
		}
	}
}

// checkSecondAttachment requests by hand that a volume is attached to a second node. The driver
// refuses and names the node to which the volume is attached.
func (a attachTest) checkSecondAttachment(has *v1.Pod, other string) {
	a.Helper()
	ctx, attachments := context.Background(), a.cs.StorageV1().VolumeAttachments()
	claim, err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Get(ctx, "data-"+has.Name, metav1.GetOptions{})
	if err != nil {
		a.Fatal(err)
	}
	// Not the cluster's generated name, because the cluster would delete an attachment that no pod
	// needs.
	name := "by-hand-" + a.ns
	if _, err := attachments.Create(ctx, &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: driverName, NodeName: other,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &claim.Spec.VolumeName}}},
		metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	want := fmt.Sprintf("because  FailedPrecondition: node %s has volume %s\n", has.Spec.NodeName,
		claim.Spec.VolumeName)
	testenv.Eventually(a, soon, func() error {
		if out := a.kctlOutput("why", "pvc/"+claim.Name); !strings.Contains(out, "cannot be attached to node "+other) ||
			!strings.Contains(out, want) {
			return fmt.Errorf("want %q, the output is: %s", want, out)
		}
		return nil
	})
	if err := attachments.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	a.awaitNotFound("the attachment by hand", func() error {
		_, err := attachments.Get(ctx, name, metav1.GetOptions{})
		return err
	})
}
