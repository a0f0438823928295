package links

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

const theirs = `{"cniVersion":"1.0.0","name":"theirs","plugins":[{"type":"bridge","bridge":"theirs0","isGateway":true,
"ipam":{"type":"host-local","dataDir":"/run/theirs","ranges":[[{"subnet":"198.51.100.0/24"}]]}}]}`

// F109: a foreign CNI configuration takes effect on a worker while it runs: pods get its addresses,
// and the node has no routes, tunnel or masquerading of Keelson's network. An invalid file makes
// the node not Ready, with the file's line in the message. When the file is deleted, Keelson's
// network is restored, and nothing is left of the pods of the foreign network.
func TestAnotherNetworkByItsFile(t *testing.T) {
	requireLab(t)
	const file = "/etc/cni/net.d/10-theirs.conflist"
	cs, ns := testenv.Client(t), testenv.Namespace(t)
	t.Cleanup(func() { _ = testenv.Host(t, "w3").Command(context.Background(), "rm", "-f", file).Run() })
	put := func(text string) {
		t.Helper()
		cmd := testenv.Host(t, "w3").Command(t.Context(), "sh", "-c", "cat > "+file+".new && mv "+file+".new "+file)
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	start := func(name string) (address string) {
		t.Helper()
		zero := int64(0)
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PodSpec{NodeName: "w3", TerminationGracePeriodSeconds: &zero,
				Containers: []v1.Container{{Name: "main", Image: tools, Command: []string{"sleep", "1000000"}}}}}
		if _, err := cs.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, soon, func() error {
			got, err := cs.CoreV1().Pods(ns).Get(t.Context(), name, metav1.GetOptions{})
			if err == nil && got.Status.Phase != v1.PodRunning {
				err = fmt.Errorf("pod %s: %+v", name, got.Status)
			}
			if err == nil {
				address = got.Status.PodIP
			}
			return err
		})
		return address
	}
	ready := func(want string) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			n, err := cs.CoreV1().Nodes().Get(t.Context(), "w3", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range n.Status.Conditions {
				if c.Type == v1.NodeReady && (c.Status == v1.ConditionTrue) == (want == "") &&
					strings.Contains(c.Message, want) {
					return nil
				}
			}
			return fmt.Errorf("w3: %+v", n.Status.Conditions)
		})
	}
	kernel := func() string {
		return runOnHost(t, "w3", "sh", "-c",
			"ip route show proto 75; ip -6 route show proto 75; ip -o link show type "+
				"vxlan; nft list ruleset | grep 10.244.0.0/16 || true")
	}
	if at := start("own"); !strings.HasPrefix(at, "10.244.") {
		t.Errorf("on the own network: %s", at)
	}
	put(theirs)
	if at := start("other"); !strings.HasPrefix(at, "198.51.100.") {
		t.Errorf("on the other network: %s", at)
	}
	testenv.Eventually(t, soon, func() error {
		if left := kernel(); left != "" {
			return errors.New("of the own network there is still " + left)
		}
		return nil
	})
	put("{\n\"name\": \"theirs\",\n\"plugins\": oops}\n")
	ready("10-theirs.conflist, line 3: invalid character 'o'")
	put(theirs)
	ready("")
	runOnHost(t, "w3", "rm", file)
	if at := start("again"); !strings.HasPrefix(at, "10.244.") {
		t.Errorf("on the own network again: %s", at)
	}
	testenv.Eventually(t, soon, func() error {
		if have := kernel(); !strings.Contains(have, "keelson-vx") ||
			!strings.Contains(have, "unreachable 10.244.0.0/16") {
			return errors.New("of the own network there is only " + have)
		}
		return nil
	})
	testenv.Kctl(t, "-n", ns, "delete", "pod", "own", "other", "again")
	testenv.Eventually(t, soon, func() error {
		if left := runOnHost(t, "w3", "sh", "-c",
			"ls /run/theirs/theirs | grep 198 || true; ip -o link show master theirs0"); left != "" {
			return errors.New("left: " + left)
		}
		return nil
	})
}
