{{/* The prefix of all objects' names. */}}
{{- define "outrider.name" -}}
{{- $name := ternary .Release.Name (printf "%s-outrider" .Release.Name) (contains "outrider" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* torch or vllm. Several GPUs for one verifier need packages that the image of torch lacks. */}}
{{- define "outrider.engine" -}}
{{- $verifier := .Values.verifier -}}
{{- $engine := $verifier.engine | default (ternary "vllm" "torch" (gt (int $verifier.gpus) 0)) -}}
{{- if and (eq $engine "torch") (gt (int $verifier.gpus) 1) -}}
{{- fail (printf "verifier.gpus is %d, and engine torch takes one GPU: set verifier.engine to vllm" (int $verifier.gpus)) -}}
{{- end -}}
{{- if and (gt (int $verifier.nodes) 1) (or (eq $engine "torch") (eq (int $verifier.gpus) 0) (not $verifier.imageTag)) -}}
{{- fail (printf "verifier.nodes is %d: several nodes need engine vllm, verifier.gpus, and in verifier.imageTag an image that has Ray" (int $verifier.nodes)) -}}
{{- end -}}
{{- $engine -}}
{{- end -}}

{{/* The helpers below are given a dict: root, component (coordinator, verifier, edge), and, if they are others, image and the
key of its values. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "outrider.metadata" -}}
name: {{ include "outrider.name" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "outrider.labels" . | nindent 2 }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* The fields that all pods share. The Services' own variables (enableServiceLinks) would look like settings. */}}
{{- define "outrider.pod" -}}
{{- $values := index .root.Values (.values | default .component) -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "outrider.selector" . | nindent 8 }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "outrider.container" -}}
name: {{ .component }}
{{- $tag := (index .root.Values (.values | default .component)).imageTag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
image: {{ .root.Values.image.prefix }}outrider-{{ .image | default .component }}:{{ $tag }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Settings from `env`, as environment variables. */}}
{{- define "outrider.env" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* A variable from the Secret; given: root, name, key, optional. */}}
{{- define "outrider.secret" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.existingSecret }}
      key: {{ .key }}
      {{- if .optional }}
      optional: true
      {{- end }}
{{- end -}}

{{/* The readiness probe. Kubernetes' gRPC probes speak no TLS; with TLS it asks the server of metrics instead. */}}
{{- define "outrider.ready" -}}
{{- if .root.Values.tls.enabled -}}
httpGet: {path: /healthz, port: metrics}
{{- else -}}
grpc: {port: {{ .port }}}
{{- end -}}
{{- end -}}

{{- define "outrider.coordinator" -}}
{{ include "outrider.name" . }}-coordinator.{{ .Release.Namespace }}.svc:7700
{{- end -}}
