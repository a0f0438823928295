package apiservertest

import (
	"encoding/base64"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// EncodedCertificateRequest is a PEM certificate request in base64.
const EncodedCertificateRequest = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0KTUlIR01HNENBUUF3RERFS01BZ0dBMVVFQXd3QllUQlpNQk1HQnlxR1NNNDlBZ0VHQ0NxR1NNNDlBd0VIQTBJQQpCTGpHOGwzSkZ3VmY1QnZNdG9mNGgxMVJPUnlQRVFkMDdJOWJ5aEtEN0Q5K1JpaFNFTkp0aEZaTUIyVWh3MDFRCldkZVhTMmlwVVgwbVd0MFU3Ti9uWXFtZ0FEQUtCZ2dxaGtqT1BRUURBZ05JQURCRkFpQk9jMldCWWxUMGxlSUMKWlhFVkJ0a3J6R1pLeG1ZbW9leWlSRUdHSWUvWElRSWhBUEhWdUpZVVdGZnJISkNoSGsxdlBjL1d2b2tVbXBOMApPRjNjT281TGNNQkoKLS0tLS1FTkQgQ0VSVElGSUNBVEUgUkVRVUVTVC0tLS0tCg=="

// ValidCA is the PEM certificate of a certificate authority.
const ValidCA = `-----BEGIN CERTIFICATE-----
MIIBbjCCARWgAwIBAgIUWgP/ydYerP2P1N2A6qv+2Jdeu3kwCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBYTAgFw0yNjExMjIxNTI5MDhaGA8yMTI2MTAyOTE1MjkwOFow
DDEKMAgGA1UEAwwBYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLjG8l3JFwVf
5BvMtof4h11RORyPEQd07I9byhKD7D9+RihSENJthFZMB2Uhw01QWdeXS2ipUX0m
Wt0U7N/nYqmjUzBRMB0GA1UdDgQWBBSYQQyvNIP6Jhl6inoKkab4La3ueDAfBgNV
HSMEGDAWgBSYQQyvNIP6Jhl6inoKkab4La3ueDAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0cAMEQCIFKsiytLxk0Dvq0xcPYbL8582Zx75AkzZvX4nXBczsqx
AiBY3Uz4EAwgxP7JAUSSCxQpZ/OGHXFhT8B2wa9aUT2kxg==
-----END CERTIFICATE-----
`

// NewCertificateRequest returns a CertificateSigningRequest without a name for signer x.io/y.
func NewCertificateRequest() *certificatesv1.CertificateSigningRequest {
	request, err := base64.StdEncoding.DecodeString(EncodedCertificateRequest)
	if err != nil {
		panic(err) // EncodedCertificateRequest is a constant
	}
	return &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
		Request: request, SignerName: "x.io/y", Usages: []certificatesv1.KeyUsage{certificatesv1.UsageAny},
	}}
}
