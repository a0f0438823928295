package serviceaccount

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestPlan(t *testing.T) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}
	going := ns.DeepCopy()
	going.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	ca := func(data map[string]string) *corev1.ConfigMap { return &corev1.ConfigMap{Data: data} }
	good := ca(map[string]string{"ca.crt": "PEM"})
	for _, c := range []struct {
		name    string
		ns      *corev1.Namespace
		account bool
		ca      *corev1.ConfigMap
		want    string // account, create, update
	}{
		{"new", ns, false, nil, "true true false"},
		{"complete", ns, true, good, "false false false"},
		{"account lost", ns, false, good, "true false false"},
		{"certificate changed by someone", ns, true, ca(map[string]string{"ca.crt": "other"}), "false false true"},
		{"something was added", ns, true, ca(map[string]string{"ca.crt": "PEM", "x": "y"}), "false false true"},
		{"going", going, false, nil, "false false false"},
	} {
		n := PlanNamespace(c.ns, c.account, c.ca, "PEM")
		if got := fmt.Sprint(n.Account != nil, n.Create != nil, n.Update != nil); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		for _, m := range []*corev1.ConfigMap{n.Create, n.Update} {
			if m != nil && (len(m.Data) != 1 || m.Data["ca.crt"] != "PEM") {
				t.Errorf("%s: data %v", c.name, m.Data)
			}
		}
	}
}

func TestPlanToken(t *testing.T) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "robot", UID: "u1"}}
	data := func(token, ca, namespace string) map[string][]byte {
		return map[string][]byte{"token": []byte(token), "ca.crt": []byte(ca), "namespace": []byte(namespace)}
	}
	for _, c := range []struct {
		name string
		data map[string][]byte
		want string // writes: a token request, ca.crt, namespace
	}{
		{"new", nil, "true true PEM ns"},
		{"complete", data("t", "PEM", "ns"), "false false"},
		{"without a token", data("", "PEM", "ns"), "true true PEM ns"},
		{"with other certificates", data("t", "old", "ns"), "true false PEM ns"},
		{"without a namespace", data("t", "PEM", ""), "true false PEM ns"},
		{"with a namespace of its own", data("t", "old", "mine"), "true false PEM mine"},
	} {
		s := &corev1.Secret{Type: corev1.SecretTypeServiceAccountToken,
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s"}, Data: c.data}
		next, token := PlanToken(s, account, []byte("PEM"))
		got := fmt.Sprint(next != nil, token)
		if next != nil {
			got += fmt.Sprintf(" %s %s", next.Data["ca.crt"], next.Data["namespace"])
			if next.Annotations[corev1.ServiceAccountUIDKey] != "u1" {
				t.Errorf("%s: annotations %v", c.name, next.Annotations)
			}
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestRepresents(t *testing.T) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "robot", UID: "u1"}}
	for _, c := range []struct {
		secretType corev1.SecretType
		name, uid  string
		want       bool
	}{
		{corev1.SecretTypeServiceAccountToken, "robot", "", true},
		{corev1.SecretTypeServiceAccountToken, "robot", "u1", true},
		{corev1.SecretTypeServiceAccountToken, "robot", "u0", false},
		{corev1.SecretTypeServiceAccountToken, "other", "", false},
		{corev1.SecretTypeOpaque, "robot", "u1", false},
	} {
		s := &corev1.Secret{Type: c.secretType, ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			corev1.ServiceAccountNameKey: c.name, corev1.ServiceAccountUIDKey: c.uid}}}
		if got := Represents(s, account); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
