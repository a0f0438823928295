package ingress

import (
	"bytes"
	"fmt"
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
)

// securedBy returns the n-th created Ingress of class own in namespace shop.
func securedBy(n int, secrets ...string) *networkingv1.Ingress {
	class := "own"
	i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint("i", n),
		CreationTimestamp: metav1.Unix(int64(n), 0)}}
	i.Spec.IngressClassName = &class
	for _, s := range secrets {
		i.Spec.TLS = append(i.Spec.TLS, networkingv1.IngressTLS{SecretName: s})
	}
	return i
}

func inAll(given [MaxShards]map[string][]byte) map[string][]byte {
	out := map[string][]byte{}
	for _, g := range given {
		maps.Copy(out, g)
	}
	return out
}

// Proxies get the key pairs that Ingresses of their class refer to, and no other data of Secrets.
func TestGivenIsWhatIngressesName(t *testing.T) {
	w := shop(t)
	w.secrets["shop/unnamed"] = secret(t, "unnamed", "1", "b.x")
	w.secrets["shop/good"].Data["ca.key"] = []byte("somebody else's")
	w.secrets["other/good"] = w.secrets["shop/good"]
	large := secret(t, "large", "1", "c.x")
	large.Data[corev1.TLSCertKey] = append(bytes.Repeat([]byte("#\n"), maxPairBytes/2),
		large.Data[corev1.TLSCertKey]...)
	w.secrets["shop/large"] = large
	foreign := securedBy(2, "unnamed")
	*foreign.Spec.IngressClassName = "other"
	gone := securedBy(3, "unnamed")
	gone.DeletionTimestamp = &metav1.Time{Time: time.Unix(4, 0)}
	given, left := SecretShards("own", []*networkingv1.Ingress{foreign, gone,
		securedBy(1, "good", "broken", "opaque", "lost", "large", "", "good")}, w, &pairs.Cache{})
	certificate, key := pairs.FileNames("shop", "good")
	want := map[string][]byte{certificate: w.secrets["shop/good"].Data[corev1.TLSCertKey],
		key: w.secrets["shop/good"].Data[corev1.TLSPrivateKeyKey]}
	if got := inAll(given); !maps.EqualFunc(got, want, bytes.Equal) || len(left) > 0 {
		t.Errorf("given are %d files, left %v", len(got), left)
	}
}

// The key pairs fit into Secrets; those of older Ingresses come first, and a key pair does not move
// when others are added.
func TestGivenHasRoom(t *testing.T) {
	w := shop(t)
	one := secret(t, "one", "1", "a.x")
	one.Data[corev1.TLSCertKey] = append(bytes.Repeat([]byte("#\n"), 30<<10), one.Data[corev1.TLSCertKey]...)
	size, room := pairSize(one), 0
	var all []*networkingv1.Ingress
	var before [MaxShards]map[string][]byte
	var keys pairs.Cache
	for n := range 200 {
		name := fmt.Sprint("s", n)
		s := *one
		s.Name = name
		w.secrets["shop/"+name] = &s
		all = append([]*networkingv1.Ingress{securedBy(n, name)}, all...)
		given, left := SecretShards("own", all, w, &keys)
		for i, g := range given {
			total := 0
			for _, data := range g {
				total += len(data)
			}
			if total > corev1.MaxSecretSize {
				t.Fatalf("shard %d has %d bytes", i, total)
			}
			for file := range before[i] {
				if g[file] == nil {
					t.Fatalf("with %d pairs, one has left shard %d", n+1, i)
				}
			}
		}
		before = given
		if got := len(inAll(given)) / 2; got+len(left) != n+1 || len(left) > 0 && !left["shop/"+name] {
			t.Fatalf("of %d pairs %d are given, %v left", n+1, got, left)
		} else {
			room = max(room, got)
		}
	}
	if want := MaxShards * (corev1.MaxSecretSize / size); room != want {
		t.Errorf("there is room for %d pairs of %d bytes, want %d", room, size, want)
	}
}
