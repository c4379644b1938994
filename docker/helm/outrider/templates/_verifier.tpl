{{/* The pod of a verifier; with several nodes, of the leader of each group. Given: the root. */}}
{{- define "outrider.verifier" -}}
{{- $of := dict "root" . "component" "verifier" -}}
{{- $values := .Values.verifier -}}
{{- $vllm := eq (include "outrider.engine" .) "vllm" -}}
{{- $several := gt (int $values.nodes) 1 -}}
{{- $name := printf "%s-verifier" (include "outrider.name" .) -}}
{{- $domain := $values.external.domain | default (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
metadata:
  labels: {{- include "outrider.selector" $of | nindent 4 }}
spec:
  {{- include "outrider.pod" $of | nindent 2 }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 30 }}
  containers:
    - {{- include "outrider.container" (merge (dict "image" (ternary "verifier-vllm" "" $vllm)) $of) | nindent 6 }}
      {{- if $several }}
      command:
        - sh
        - -c
        - {{ printf "%s && exec outrider-verifier \"$@\"" (include "outrider.ray" "--head --port=6379") | quote }}
        - outrider-verifier
      {{- end }}
      args:
        - --model=/models/{{ $values.model.path }}
        {{- with $values.model.draft }}
        - --draft=/models/{{ . }}
        {{- end }}
        - --listen=0.0.0.0:7710
        - --metrics=0.0.0.0:9110
        - --verifier-id=$(POD_NAME)
        - --advertise=$(POD_NAME).{{ $domain }}:7710
        - --coordinator={{ include "outrider.coordinator" . }}
        {{- if gt (int $values.gpus) 0 }}
        - --device=cuda
        {{- end }}
        {{- if $several }}
        - '--engine-args={"tensor_parallel_size": {{ $values.gpus }}, "distributed_executor_backend": "ray", "pipeline_parallel_size": {{ $values.nodes }}}'
        {{- else if gt (int $values.gpus) 1 }}
        - '--engine-args={"tensor_parallel_size": {{ $values.gpus }}}'
        {{- end }}
        - --threads={{ $values.threads }}
        {{- if .Values.tls.enabled }}
        - --tls-cert=/tls/tls.crt
        - --tls-key=/tls/tls.key
        - --coordinator-ca=/coordinator-ca/ca.crt
        {{- else }}
        - --insecure
        {{- end }}
        {{- with $values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        - name: OUTRIDER_VERIFIER_DRAIN_S
          value: {{ $values.drainSeconds | quote }}
        {{- include "outrider.secret" (dict "root" . "name" "OUTRIDER_VERIFIER_JOIN_TOKEN" "key" "join-token") | nindent 8 }}
        {{- with $values.env }}
        {{- include "outrider.env" . | nindent 8 }}
        {{- end }}
      ports:
        - {name: grpc, containerPort: 7710}
        - {name: metrics, containerPort: 9110}
      startupProbe:
        {{- include "outrider.ready" (dict "root" . "port" 7710) | nindent 8 }}
        periodSeconds: 5
        failureThreshold: {{ div (add $values.startupSeconds 4) 5 }}
        timeoutSeconds: 3
      readinessProbe:
        {{- include "outrider.ready" (dict "root" . "port" 7710) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        {{- include "outrider.ready" (dict "root" . "port" 7710) | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      # SIGTERM begins the drain, and the hook waits for its end. If the drain takes too long, Kubernetes sends a
      # second SIGTERM, at which the verifier hands its sessions over and ends at once.
      lifecycle:
        preStop:
          exec:
            command: [sh, -c, "kill -TERM 1 && timeout {{ add $values.drainSeconds 15 }} tail --pid=1 -f /dev/null"]
      resources: {{- include "outrider.verifierResources" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $vllm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- if .Values.tls.enabled }}
        - {name: tls, mountPath: /tls, readOnly: true}
        - {name: coordinator-ca, mountPath: /coordinator-ca, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if $vllm }}
    # Through it vLLM's ranks exchange messages, for which a container's usual 64 MiB are too few.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 2Gi}}
    {{- end }}
    {{- include "outrider.models" . | nindent 4 }}
    {{- if .Values.tls.enabled }}
    - name: tls
      secret: {secretName: {{ .Values.tls.verifierSecret }}}
    - name: coordinator-ca
      secret:
        secretName: {{ .Values.tls.coordinatorSecret }}
        items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
{{- end -}}

{{/* A pod with further GPUs for a verifier of several nodes: Ray alone, in which vLLM's ranks run. Given: the root. */}}
{{- define "outrider.verifierWorker" -}}
{{- $of := dict "root" . "component" "verifier-worker" "values" "verifier" "image" "verifier-vllm" -}}
{{- $values := .Values.verifier -}}
metadata:
  labels: {{- include "outrider.selector" $of | nindent 4 }}
spec:
  {{- include "outrider.pod" $of | nindent 2 }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 30 }}
  containers:
    - {{- include "outrider.container" $of | nindent 6 }}
      command:
        - sh
        - -c
        - {{ include "outrider.ray" "--address=$LWS_LEADER_ADDRESS:6379 --block" | quote }}
      # The leader drains, and needs this pod meanwhile.
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ add $values.drainSeconds 15 | quote }}]}
      resources: {{- include "outrider.verifierResources" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: /models, readOnly: true}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: 2Gi}}
    {{- include "outrider.models" . | nindent 4 }}
{{- end -}}

{{- define "outrider.verifierResources" -}}
{{- $values := .Values.verifier -}}
{{- $resources := deepCopy $values.resources -}}
{{- if gt (int $values.gpus) 0 -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $values.gpus) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "outrider.models" -}}
{{- $claim := dict "claimName" (printf "%s-models" (include "outrider.name" .)) "readOnly" true -}}
- name: models
  {{- toYaml (.Values.verifier.model.volume | default (dict "persistentVolumeClaim" $claim)) | nindent 2 }}
{{- end -}}

{{/* A shell command that starts Ray with these flags. vLLM's ranks import two of Outrider's packages, and must find no others. */}}
{{- define "outrider.ray" -}}
mkdir -p /tmp/packages && cd /tmp/packages && for name in outrider cloud_verifier; do
ln -sfn "$(python -c "import $name; print($name.__path__[0])")" "$name"; done && cd - &&
PYTHONPATH=/tmp/packages VLLM_USE_V2_MODEL_RUNNER=0 /opt/vllm/bin/ray start {{ . }}
{{- end -}}
