package why

import (
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// explainSigningRequest returns a Finding for a CertificateSigningRequest that is not approved, is
// denied, has failed, or is approved but not signed. It returns nil if the certificate is issued.
func (w *World) explainSigningRequest(c *certificatesv1.CertificateSigningRequest) []Finding {
	if len(c.Status.Certificate) > 0 {
		return nil
	}
	f := Finding{Object: objectName("certificatesigningrequest", c), What: "waits for somebody to approve it",
		Since: timeOrNil(c.CreationTimestamp)}
	f.Because = fmt.Sprintf("requests to %s are approved by hand", singleLine(c.Spec.SignerName))
	if c.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName {
		f.Because = fmt.Sprintf("no role lets %s have it approved: that takes a right to create "+
			"certificatesigningrequests/nodeclient, or "+
			"selfnodeclient for the own name", singleLine(c.Spec.Username))
	}
	f.Mend = []string{kctlCommand(c, "describe certificatesigningrequest %s   # who asks, and for what", c.Name),
		kctlCommand(c, "certificate approve %s   # or deny", c.Name)}
	approved := false
	for _, k := range c.Status.Conditions {
		why := singleLine(k.Reason + ": " + k.Message)
		switch k.Type {
		case certificatesv1.CertificateFailed, certificatesv1.CertificateDenied:
			f.What, f.Because, f.Since = "is "+strings.ToLower(string(k.Type)), why, timeOrNil(k.LastTransitionTime)
			if k.Type == certificatesv1.CertificateFailed {
				f.What = "has failed"
			}
			f.Mend = []string{kctlCommand(c, "delete certificatesigningrequest %s   # then create another request: a "+
				"request cannot be changed", c.Name)}
			return []Finding{f}
		case certificatesv1.CertificateApproved:
			approved, f.Since = true, timeOrNil(k.LastTransitionTime)
		}
	}
	if approved {
		f.What, f.Because = "is approved and has no certificate",
			fmt.Sprintf("signer %s has not answered", singleLine(c.Spec.SignerName))
		f.Mend = []string{"kctl cluster status   # the leader signs for signers of kubernetes.io; others " +
			"run for themselves"}
	}
	return []Finding{f}
}
