package why

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSigningRequests(t *testing.T) {
	request := func(signer string,
		conditions ...certificatesv1.CertificateSigningRequestCondition) *certificatesv1.CertificateSigningRequest {
		return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "ann",
			CreationTimestamp: ago(time.Hour)},
			Spec:   certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Username: "system:node:w1"},
			Status: certificatesv1.CertificateSigningRequestStatus{Conditions: conditions}}
	}
	is := func(k certificatesv1.RequestConditionType,
		reason, message string) certificatesv1.CertificateSigningRequestCondition {
		return certificatesv1.CertificateSigningRequestCondition{Type: k, Status: corev1.ConditionTrue, Reason: reason,
			Message: message, LastTransitionTime: ago(time.Minute)}
	}
	approved := is(certificatesv1.CertificateApproved, "ByHand", "")
	issued := request(certificatesv1.KubeAPIServerClientSignerName, approved)
	issued.Status.Certificate = []byte("PEM")
	transcript(t, "certificates", []subject{
		{"pending", World{}, request(certificatesv1.KubeAPIServerClientSignerName)},
		{"pending, of a node", World{}, request(certificatesv1.KubeAPIServerClientKubeletSignerName)},
		{"denied", World{}, request("example.com/s", is(certificatesv1.CertificateDenied, "ByHand", "not you"))},
		{"not permitted", World{}, request(certificatesv1.KubeletServingSignerName, approved,
			is(certificatesv1.CertificateFailed, "SignerValidationFailure", "a DNS or IP subjectAltName is required"))},
		{"no signer", World{}, request("example.com/s", approved)},
		{"issued", World{}, issued},
	})
}
