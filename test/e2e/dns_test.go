package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// clusterDNSAddress returns the IP address of the cluster's DNS.
func (w testNamespace) clusterDNSAddress() string {
	w.Helper()
	svc, err := w.cs.CoreV1().Services(metav1.NamespaceSystem).Get(context.Background(), "kube-dns",
		metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return svc.Spec.ClusterIP
}

// awaitResolution waits until the resolver in a pod prints want for args.
func (w testNamespace) awaitResolution(pod, want string, args ...string) {
	w.Helper()
	kctl := filepath.Join(testenv.Lab().Config.BinDir, "kctl")
	testenv.Eventually(w, soon, func() error {
		out, _ := testenv.Try(w, kctl, append([]string{"-n", w.ns, "exec", pod, "--", "nslookup"}, args...)...)
		if !regexp.MustCompile(want).MatchString(out) {
			return fmt.Errorf("nslookup %s:\n%s\nwant %s", strings.Join(args, " "), out, want)
		}
		return nil
	})
}

// Every kind of record, asked for from a pod by the resolver that it has: Services with an address, headless ones, pods
// of a StatefulSet by name, named ports, names elsewhere, pods, and addresses.
func TestDNSRecords(t *testing.T) {
	w := newNamespace(t)
	dns := w.clusterDNSAddress()
	if !strings.HasSuffix(dns, ".10") {
		t.Errorf("the cluster's DNS is at %s, want the tenth address of the range", dns)
	}
	svc := w.createService(webService("web", v1.ServiceTypeClusterIP))
	headless := webService("db", v1.ServiceTypeClusterIP)
	headless.Spec.ClusterIP = v1.ClusterIPNone
	w.createService(headless)
	alias := webService("alias", v1.ServiceTypeExternalName)
	alias.Spec.Selector, alias.Spec.Ports, alias.Spec.ExternalName = nil, nil, "web."+w.ns+".svc.cluster.local"
	w.createService(alias)
	labels := map[string]string{"app": "db"}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: appsv1.StatefulSetSpec{
		ServiceName: "db", Replicas: new(int32(2)), Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: newPod("x", hello).Spec}}}
	if _, err := w.cs.AppsV1().StatefulSets(w.ns).Create(context.Background(), set, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	client := sleeperPod("client")
	client.Spec.NodeName = "w1"
	w.createPod(client)
	host := sleeperPod("on-host")
	host.Spec.NodeName, host.Spec.HostNetwork, host.Spec.DNSPolicy = "w2", true, v1.DNSClusterFirstWithHostNet
	w.createPod(host)
	w.awaitPod("client", requireReady)
	w.awaitPod("on-host", requireReady)
	ip := w.awaitPod("db-1", requireReady).Status.PodIP
	q := regexp.QuoteMeta
	for _, from := range []string{"client", "on-host"} {
		w.awaitResolution(from, `Address:\s+`+q("10.")+`\d+\.\d+\.1\n`, "kubernetes.default.svc.cluster.local")
		w.awaitResolution(from, q(svc.Spec.ClusterIP), "web."+w.ns+".svc.cluster.local")
		w.awaitResolution(from, q(ip), "db."+w.ns+".svc.cluster.local")
		w.awaitResolution(from, q(ip), "db-1.db."+w.ns+".svc.cluster.local")
	}
	w.awaitResolution("client", q("kubernetes.default"), "kubernetes.default") // by the search domains
	w.awaitResolution("client", q("web."+w.ns+".svc.cluster.local"), svc.Spec.ClusterIP)
	w.awaitResolution("client", q("db-1.db."+w.ns), ip)
	w.awaitResolution("client", q(svc.Spec.ClusterIP), "alias."+w.ns+".svc.cluster.local")
	w.awaitResolution("client", `80 web\.`+q(w.ns), "-type=srv", "_http._tcp.web."+w.ns+".svc.cluster.local")
	w.awaitResolution("client", `8080 db-1\.db\.`, "-type=srv", "_http._tcp.db."+w.ns+".svc.cluster.local")
	w.awaitResolution("client", q(ip), strings.ReplaceAll(ip, ".", "-")+"."+w.ns+".pod.cluster.local")
	w.awaitResolution("client", "NXDOMAIN", "none."+w.ns+".svc.cluster.local")
	w.awaitResolution("client", q("169.254.20.10"), "web."+w.ns+".svc.cluster.local", "169.254.20.10")
	if got := testenv.Kctl(t, "-n", w.ns, "exec", "client", "--", "cat",
		"/etc/resolv.conf"); !strings.Contains(got, "nameserver "+dns+"\n") ||
		!strings.Contains(got, "search "+w.ns+".svc.cluster.local svc.cluster.local cluster.local") ||
		!strings.Contains(got, "ndots:5") {
		t.Errorf("the pod's resolv.conf: %s", got)
	}
}

// The settings of the ConfigMap take effect on every node; an invalid setting is reported and
// changes nothing.
func TestDNSCorefile(t *testing.T) {
	w := newNamespace(t)
	client := sleeperPod("client")
	w.createPod(client)
	w.awaitPod("client", requireReady)
	maps := w.cs.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "coredns"},
		Data: map[string]string{"NodeHosts": "192.0.2.20 host.lan\n", "Corefile": `.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
    }
    hosts /etc/coredns/NodeHosts {
        fallthrough
    }
    rewrite name exact api.lan kubernetes.default.svc.cluster.local
}
`}}
	cm, err := maps.Create(context.Background(), cm, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = maps.Delete(context.Background(), "coredns", metav1.DeleteOptions{}) })
	w.awaitResolution("client", regexp.QuoteMeta("192.0.2.20"), "host.lan.")
	w.awaitResolution("client", `Address:\s+10\.`, "api.lan.")
	cm.Data["Corefile"] = strings.Replace(cm.Data["Corefile"], "errors", "forward . nowhere", 1)
	if _, err := maps.Update(context.Background(), cm, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		all, err := w.cs.CoreV1().Events(metav1.NamespaceSystem).List(context.Background(),
			metav1.ListOptions{FieldSelector: "involvedObject.name=coredns"})
		if err != nil {
			return err
		}
		for i := range all.Items {
			if all.Items[i].Reason == "CorefileRefused" && strings.Contains(all.Items[i].Message, "line 2: forward") {
				return nil
			}
		}
		return errors.New("no event reports the error")
	})
	w.awaitResolution("client", regexp.QuoteMeta("192.0.2.20"), "host.lan.")
}

// Names are answered while no control plane is up, also by an agent that starts meanwhile.
//
// P22
func TestDNSOutlivesTheControlPlane(t *testing.T) {
	w := newNamespace(t)
	dns := w.clusterDNSAddress()
	svc := w.createService(webService("web", v1.ServiceTypeClusterIP))
	client := sleeperPod("client")
	client.Spec.NodeName = "w1"
	w.createPod(client)
	w.awaitPod("client", requireReady)
	name := "web." + w.ns + ".svc.cluster.local"
	w.awaitResolution("client", regexp.QuoteMeta(svc.Spec.ClusterIP), name)
	node := testenv.Host(t, "w1")
	ask := func() {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			out, err := node.Command(context.Background(), "busybox", "nslookup", name, dns).CombinedOutput()
			if err != nil || !strings.Contains(string(out), svc.Spec.ClusterIP) {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
	}
	// An agent that starts without a replica has the state of its checkpoint, which is written
	// every few seconds.
	testenv.Eventually(t, soon, func() error {
		return node.Command(context.Background(), "grep", "-q", svc.Spec.ClusterIP,
			"/var/lib/keelson/session/assignment.checkpoint").Run()
	})
	replicas := hostsOfRole(lab.RoleControlPlane)
	for _, r := range replicas {
		if err := testenv.Lab().KillDaemon(context.Background(), r); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for _, r := range replicas {
			if err := testenv.Lab().RestartDaemon(context.Background(), r); err != nil {
				t.Error(err)
			}
		}
		testenv.Eventually(t, 2*soon, func() error {
			_, err := w.cs.CoreV1().Services(w.ns).Get(context.Background(), "web", metav1.GetOptions{})
			return err
		})
	}()
	ask()
	if err := testenv.Lab().KillDaemon(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Lab().RestartDaemon(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	ask()
}
